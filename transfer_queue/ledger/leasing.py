"""Lease, Renew, Ack, Nack, Drop, Replay, ReleaseHolder, Expire: who holds which groups."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from transfer_queue.errors import Conflict, DeadlineExceeded, Fenced, Invalid, NotFound
from transfer_queue.ledger.checks import check_name, check_unique, clipped, some
from transfer_queue.ledger.groups import Group
from transfer_queue.ledger.leases import HeldLease
from transfer_queue.ledger.partition import Partition
from transfer_queue.ledger.ready import ReadyQueue
from transfer_queue.ledger.telling import MAX_TOLD, fitting_groups
from transfer_queue.net.messages import (
    Ack,
    Drop,
    Expire,
    Lease,
    Leased,
    Nack,
    Ok,
    ReleaseHolder,
    Renew,
    Replay,
    TaskSpec,
)

if TYPE_CHECKING:
    from transfer_queue.ledger.ledger import Ledger


def lease(ledger: Ledger, m: Lease, now: float) -> Leased:
    """Whole groups only, oldest order first, as many as one answer can tell. Raises DeadlineExceeded if there is none
    now."""
    p = ledger.partition(m.partition)
    if not can_lease(p, m):
        raise DeadlineExceeded(f"nothing to lease now for task {m.task!r} in partition {m.partition!r}")
    task = p.task(m.task)
    source = _source(p, task, m)
    assert source is not None
    uids = m.uids or source.pop(1 if source is p.suspects else m.groups, _last(p, task))
    groups = [p.groups[uid] for uid in uids]
    if not m.uids:
        fitting = fitting_groups(p, groups)
        for group in groups[fitting:]:
            source.add(group.order, group.uid)
        groups = groups[:fitting]
    held = p.lease(task, m.holder, groups, now)
    ttl = task.ttl if task.bind == "clock" else 0.0
    return Leased(token=held.token, groups=[p.view(group) for group in held.groups.values()], ttl=ttl)


def can_lease(p: Partition, m: Lease) -> bool:
    """Whether the lease would get something now. Raises Invalid, NotFound or Fenced if it never will."""
    task = p.task(m.task)
    check_name("holder", m.holder)
    if task.bind == "incarnation" and m.incarnation not in (0, p.incarnation):
        raise Fenced(
            f"{m.holder!r} is incarnation {m.incarnation} of the trainer of partition {p.name!r}; "
            f"{p.incarnation} has taken over. Stop this one"
        )
    if (m.groups > 0) == bool(m.uids):
        raise Invalid(f"a lease names either groups (> 0) or uids, not groups={m.groups} and {len(m.uids)} uids")
    source, last = _source(p, task, m), _last(p, task)
    if not m.uids:
        return source is not None and len(source) > 0 and source.first() <= last
    check_unique("uid", m.uids)
    ended = [uid for uid in m.uids if (group := p.groups.get(uid)) is None or group.state == "trained"]
    if ended:
        raise NotFound(f"groups {some(ended)} are not in partition {p.name!r}, or have ended; lease the others")
    if fitting_groups(p, [p.groups[uid] for uid in m.uids], MAX_TOLD) < len(m.uids):
        raise Invalid(f"the tags of these {len(m.uids)} groups exceed the {MAX_TOLD} bytes of an answer; lease fewer")
    if source is None or (source is p.suspects and len(m.uids) > 1):
        return False
    return all(uid in source and p.groups[uid].order <= last for uid in m.uids)


def _source(p: Partition, task: TaskSpec, m: Lease) -> ReadyQueue | None:
    """What this holder may take from. A suspect goes, alone, to a holder that has nothing in hand (a worker that was
    started for the dead one has nothing), and until it has ended that holder gets nothing else, in any partition."""
    if task.stage == "rows":
        return p.ready[task.name]
    first = p.leases.first_clock(m.holder)
    if first is not None:
        return None if first.alone else p.pending
    wants_suspect = m.uids[0] in p.suspects if m.uids else bool(p.suspects) and p.suspects.first() <= p.last_in_credit()
    return p.suspects if wants_suspect else p.pending


def offers(p: Partition, task: TaskSpec) -> bool:
    """Whether there is something to lease for some holder."""
    if task.stage == "rows":
        return len(p.ready[task.name]) > 0
    last = p.last_in_credit()
    return any(len(source) > 0 and source.first() <= last for source in (p.pending, p.suspects))


def _last(p: Partition, task: TaskSpec) -> float:
    """The last dispatch order that the task may have: prompts are generated as far as credit reaches."""
    return p.last_in_credit() if task.stage == "prompt" else math.inf


def renew(ledger: Ledger, m: Renew, now: float) -> Ok:
    """A full ttl from now."""
    p = ledger.partition(m.partition)
    ledger.leases.renew(p.require(m.token), now)
    return Ok()


def ack(ledger: Ledger, m: Ack, now: float) -> Ok:
    """The groups are trained. A prompt lease ends with the last session of each group, never by Ack."""
    p = ledger.partition(m.partition)
    held = p.require(m.token)
    groups = _covered(held, m.uids)
    if held.task.stage == "prompt":
        raise Conflict(
            f"groups {some(m.uids)} have open sessions: a prompt lease ends when all sessions are closed "
            "(Commit.closes), or by Nack"
        )
    for group in groups:
        p.train(group, m.step, now)
    return Ok()


def nack(ledger: Ledger, m: Nack, now: float) -> Ok:
    p = ledger.partition(m.partition)
    for group in _covered(p.require(m.token), m.uids):
        p.give_back(group, now, clipped(m.reason) or "given back", poison=m.poison)
    return Ok()


def _covered(held: HeldLease, uids: list[str]) -> list[Group]:
    """The groups of these uids. Raises Fenced if the lease does not cover all of them."""
    if not uids:
        raise Invalid("no uids given")
    check_unique("uid", uids)
    missing = [uid for uid in uids if uid not in held.groups]
    if missing:
        raise Fenced(
            f"lease ({held.token.epoch}, {held.token.counter}) of {held.holder!r} does not cover groups "
            f"{some(missing)} (any more): they ended or were dropped. Nothing was done; repeat it with the others"
        )
    return [held.groups[uid] for uid in uids]


def drop(ledger: Ledger, m: Drop, now: float) -> Ok:
    """A group that has ended stays as it ended."""
    p = ledger.partition(m.partition)
    if not m.reason:
        raise Invalid("a drop needs a reason (stale, filtered, failed, ...)")
    unknown = [uid for uid in m.uids if uid not in p.groups and uid not in p.seen]
    if unknown:
        raise NotFound(f"groups {some(unknown)} were never admitted to partition {p.name!r}")
    for uid in m.uids:
        group = p.groups.get(uid)
        if group is not None and group.state != "trained":
            p.finish(group, "dropped", clipped(m.reason), now)
    return Ok()


def replay(ledger: Ledger, m: Replay, now: float) -> Ok:
    """A dead group whose prompt was lost meanwhile waits for it like any other."""
    p = ledger.partition(m.partition)
    check_unique("uid", m.uids)
    unknown = [uid for uid in m.uids if uid not in p.letters]
    if unknown:
        raise NotFound(
            f"groups {some(unknown)} of partition {p.name!r} are not dead, or were cleared; these can be replayed: "
            f"{some(sorted(p.letters)) or 'none'}"
        )
    for uid in m.uids:
        p.revive(uid, now)
    return Ok()


def release_holder(ledger: Ledger, m: ReleaseHolder, now: float) -> Ok:
    """The holder's clock leases end. If it died, one of its groups may have killed it; a group that it held all alone
    most likely has: that counts as a delivery.

    Leases bound to the trainer's incarnation stay: only the next incarnation ends them.
    """
    reason = f"its holder {m.holder!r} died" if m.died else f"{m.holder!r} gave it back"
    held = [lease for lease in ledger.leases.of_holder(m.holder) if lease.task.bind == "clock"]
    alone = m.died and sum(len(lease.groups) for lease in held) == 1
    for lease in held:
        p = ledger.partition(lease.partition)
        for group in list(lease.groups.values()):
            p.give_back(group, now, reason, crash=m.died, poison=alone)
    return Ok()


def expire(ledger: Ledger, m: Expire, now: float) -> Ok:
    for lease in ledger.leases.due(now):
        p = ledger.partition(lease.partition)
        for group in list(lease.groups.values()):
            p.give_back(group, now, f"the lease of {lease.holder!r} ran out")
    return Ok()
