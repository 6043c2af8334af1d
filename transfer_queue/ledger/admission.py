"""OpenPartition and Admit: declaring a partition, and taking credit for prompt groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer_queue.errors import Conflict, Invalid, QueueFull
from transfer_queue.ledger.checks import check_blocks, check_name, check_spec, check_task, check_unique, some
from transfer_queue.ledger.groups import Group
from transfer_queue.ledger.partition import Partition
from transfer_queue.ledger.ready import ReadyQueue
from transfer_queue.net.messages import Admit, GroupSpec, Ok, OpenPartition, TaskSpec

if TYPE_CHECKING:
    from transfer_queue.ledger.ledger import Ledger


def open_partition(ledger: Ledger, m: OpenPartition, now: float) -> Ok:
    """Declare tasks and credit. A task may later change its ttl and max_deliver, nothing else."""
    check_name("partition", m.partition)
    check_unique("task", [task.name for task in m.tasks])
    for task in m.tasks:
        check_task(task)
    if m.max_groups < 0 or m.max_bytes < 0:
        raise Invalid(f"max_groups={m.max_groups}, max_bytes={m.max_bytes}: expected 0 (no bound) or more")
    p = ledger.find_or_new(m.partition)
    if m.tasks and p.tasks:
        _check_same(p, m.tasks)
    ledger.keep(p)
    p.max_groups, p.max_bytes = m.max_groups, m.max_bytes
    if m.durability:
        p.rows.puts.durability = m.durability
    first = not p.tasks
    for task in m.tasks:
        p.tasks[task.name] = task
        if first and task.stage == "rows":
            p.ready[task.name] = ReadyQueue()
    if first:
        for group in p.by_state["ready"].values():
            p.offer_ready(group)
    return Ok()


def _check_same(p: Partition, tasks: list[TaskSpec]) -> None:
    def nature(task: TaskSpec) -> tuple[object, ...]:
        return task.name, task.stage, task.bind, sorted(task.fields)

    before, after = sorted(map(nature, p.tasks.values())), sorted(map(nature, tasks))
    if before != after:
        raise Conflict(f"partition {p.name!r} is open with tasks {before}, not {after}; use another partition")


def admit(ledger: Ledger, m: Admit, now: float) -> Ok:
    """Groups that were admitted before are left alone, except that a lost prompt is replaced."""
    p = ledger.partition(m.partition)
    new, lost = check_admit(p, m)
    if not has_credit(p, m, len(new)):
        raise QueueFull(why_full(p, len(new)))
    rows = p.rows.add([spec.uid for _, spec in new]) + [group.prompt for _, group in lost]
    p.rows.write(m.blocks, rows, [at for at, _ in new] + [at for at, _ in lost])
    for (_, spec), row in zip(new, rows, strict=False):
        group = Group.of(spec, row, now)
        p.rows.owner[row] = group
        p.add_group(group)
    for _, group in lost:
        group.prompt_lost = False
        if group.state == "pending":
            p.move(group, "pending", now)
    return Ok()


def check_admit(p: Partition, m: Admit) -> tuple[list[tuple[int, GroupSpec]], list[tuple[int, Group]]]:
    """The groups that are new and those whose lost prompt is replaced, with their place in the message.

    Raises Invalid for an admission that can never be granted, Conflict if a key is taken.
    """
    check_unique("uid", [spec.uid for spec in m.groups])
    check_blocks(m.blocks, len(m.groups))
    new: list[tuple[int, GroupSpec]] = []
    lost: list[tuple[int, Group]] = []
    for at, spec in enumerate(m.groups):
        check_spec(spec)
        group = p.groups.get(spec.uid)
        if group is not None:
            if group.prompt_lost and group.state != "trained":
                lost.append((at, group))
        elif spec.uid not in p.seen:
            new.append((at, spec))
    taken = [spec.uid for _, spec in new if spec.uid in p.rows.ids]
    if taken:
        raise Conflict(f"partition {p.name!r} has plain rows with the keys {some(taken)}; clear them or use other uids")
    _check_possible(p, m, len(new))
    return new, lost


def _check_possible(p: Partition, m: Admit, new: int) -> None:
    if p.max_groups and new > p.max_groups:
        raise Invalid(f"{new} groups never fit into the {p.max_groups} of partition {p.name!r}; admit fewer at once")
    nbytes = sum(block.nbytes for block in m.blocks)
    if p.max_bytes and new and nbytes > p.max_bytes:
        raise Invalid(f"{nbytes} bytes never fit into the {p.max_bytes} of partition {p.name!r}; admit fewer at once")


def has_credit(p: Partition, m: Admit, new: int) -> bool:
    """Whether `new` more groups fit now; none always do."""
    if not new:
        return True
    if p.max_groups and p.outstanding() + new > p.max_groups:
        return False
    return not p.max_bytes or p.rows.nbytes + sum(block.nbytes for block in m.blocks) <= p.max_bytes


def may_have_credit(p: Partition, m: Admit) -> bool:
    """False if one of the first groups is new and does not fit; looks at no more of them than that."""
    room = p.max_groups - p.outstanding() if p.max_groups else len(m.groups)
    first = m.groups[: max(0, room) + 1]
    return sum(spec.uid not in p.groups and spec.uid not in p.seen for spec in first) <= room


def why_full(p: Partition, new: int) -> str:
    trained = len(p.by_state["trained"])
    return (
        f"no credit for {new} more groups in partition {p.name!r}: {p.outstanding()} of {p.max_groups or 'unlimited'} "
        f"are outstanding, {p.rows.nbytes} of {p.max_bytes or 'unlimited'} bytes live, {trained} trained groups "
        "wait for CommitStep. Credit returns when groups are trained or dropped; bytes when their step is committed"
    )
