"""OpenTrainer, CommitStep and LoseSegments: what restores, checkpoints and lost units do to groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer_queue.errors import Invalid
from transfer_queue.keys import split_row_key
from transfer_queue.ledger.groups import PROMPT_LOST, Group
from transfer_queue.ledger.partition import Partition
from transfer_queue.ledger.tags import unpack
from transfer_queue.net.messages import CommitStep, LoseSegments, Ok, OpenTrainer, Restored

if TYPE_CHECKING:
    from transfer_queue.ledger.ledger import Ledger


def open_trainer(ledger: Ledger, m: OpenTrainer, now: float) -> Restored:
    """A new incarnation, restored to `step`. What was committed stays final, even if `step` is older.

    One that `repeats` keeps whole groups whatever version sampled them, and forgets the others.
    """
    p = ledger.partition(m.partition)
    if m.step < 0:
        raise Invalid(f"step {m.step}: expected 0 (from scratch) or the step of a checkpoint")
    p.incarnation += 1
    version = m.step if m.version is None else m.version
    reissued: list[str] = []
    for group in list(p.groups.values()):
        if group.state == "trained" and group.step <= m.step:
            continue
        if m.columns:
            p.drop_columns(group, m.columns)
        if not m.repeats and _newest_version(p, group) > version:
            p.reissue(group, None, now, f"generated after step {m.step}, to which the trainer was restored")
        elif group.state == "trained":
            p.untrain(group)
            p.settle(group, now)
        elif group.lease is not None and group.lease.task.bind == "incarnation":
            p.leases.end(group)
            p.settle(group, now)
        elif group.lease is not None:
            p.give_back(group, now, "a new trainer took over")
        elif not m.repeats:
            continue
        if group.state == "pending" and m.repeats:
            p.forget(group)
        elif group.state == "pending":
            reissued.append(group.uid)
    ready = sorted(p.by_state["ready"].values(), key=lambda group: (group.order, group.uid))
    return Restored(
        incarnation=p.incarnation, reissued=reissued, ready=[group.uid for group in ready], next_order=p.next_order
    )


def _newest_version(p: Partition, group: Group) -> float:
    """The highest `max_global_steps` on a row of the group."""
    versions = (unpack(p.rows.tags[row]).get("max_global_steps", 0) for row in group.all_rows())
    return max((v for v in versions if isinstance(v, int | float)), default=0)


def commit_step(ledger: Ledger, m: CommitStep, now: float) -> Ok:
    """The cost is proportional to the groups that become final."""
    p = ledger.partition(m.partition)
    p.committed = max(p.committed, m.step)
    for step in sorted(step for step in p.trained if step <= m.step):
        for uid in p.trained.pop(step):
            p.finalize(uid)
    return Ok()


def lose_segments(ledger: Ledger, m: LoseSegments, now: float) -> Ok:
    """Rows with a field in a lost segment are gone; see `_lose_rows` for their groups."""
    lost = set(m.segments)
    for p in ledger.partitions.values():
        rows = p.rows.rows_in(lost)
        if rows:
            _lose_rows(p, rows, now)
    return Ok()


def _lose_rows(p: Partition, rows: list[int], now: float) -> None:
    plain: list[int] = []
    prompts: list[Group] = []
    sessions: dict[Group, set[int]] = {}
    for row in rows:
        group = p.rows.owner[row]
        if group is None:
            plain.append(row)
        elif row == group.prompt:
            prompts.append(group)
        else:
            sessions.setdefault(group, set()).add(split_row_key(p.rows.keys[row]).session)
    p.rows.erase(plain)
    for group in prompts:
        p.rows.strip([group.prompt])
        group.prompt_lost = True
    for group, lost in sessions.items():
        _lose_sessions(p, group, lost, now)
    for group in prompts:
        if group.state == "generating":
            p.reissue(group, [], now, PROMPT_LOST)
        elif group.state == "pending":
            p.move(group, "pending", now, PROMPT_LOST)


def _lose_sessions(p: Partition, group: Group, lost: set[int], now: float) -> None:
    """A trained group stays trained (only a restore would need its rows); any other is issued again for them."""
    closed = sorted(session for session in lost if session in group.closed)
    if group.state == "trained":
        p.rows.erase([row for session in closed for row in group.closed.pop(session)])
    else:
        p.reissue(group, closed, now, "its rows were lost with a storage unit")
