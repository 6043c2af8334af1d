"""Commit and Clear: rows, tags and session ends appear together or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING

from transfer_queue.errors import Conflict, Fenced, Invalid
from transfer_queue.keys import row_key, split_row_key, try_split_row_key
from transfer_queue.ledger.checks import check_blocks, check_name, check_names, check_unique, clipped, some
from transfer_queue.ledger.groups import Group
from transfer_queue.ledger.leases import HeldLease
from transfer_queue.ledger.order import unpacked
from transfer_queue.ledger.partition import Partition
from transfer_queue.ledger.tags import EMPTY, check_size, check_sizes, merge, pack_all, shown
from transfer_queue.ledger.telling import ROW, check_told
from transfer_queue.net.messages import Clear, Commit, Committed, Ok, SessionClose

if TYPE_CHECKING:
    from transfer_queue.ledger.ledger import Ledger


@dataclass(slots=True)
class _Plan:
    """A commit that was found acceptable: per key its row (None: new) and, if it has one, its group and session."""

    rows: list[int | None]
    tags: list[bytes] | None
    places: list[tuple[Group, int | None] | None]
    keys: dict[tuple[str, int | None], dict[str, int]] = field(default_factory=dict)
    """By uid and session, of the groups, with the bytes of the tag that comes."""


def commit(ledger: Ledger, m: Commit, now: float) -> Committed:
    """Without token and closes, it makes the partition if need be: a plain key-value put needs no ceremony."""
    plain = m.token is None and not m.closes
    p = ledger.find_or_new(m.partition) if plain else ledger.partition(m.partition)
    tags = _check_form(m)
    lease = p.require(m.token) if m.token is not None else None
    plan = _plan_rows(p, m, lease, tags)
    for close in m.closes:
        _check_close(p, plan, lease, close)
    merged = _merge_tags(p, m, plan)
    ledger.keep(p)
    rows = _write(p, m, plan)
    tags = [shown(p.rows.tags[row]) for row in rows] if merged else None
    reply = Committed(tags=tags, fields=p.rows.common_fields(rows))
    touched = {place[0].uid: place[0] for place in plan.places if place is not None}
    closing = {close.uid: p.groups[close.uid] for close in m.closes}
    for close in m.closes:
        _close(p, p.groups[close.uid], close)
    for group in closing.values():
        _after_close(p, group, now)
    for uid, group in touched.items():
        if uid not in closing and group.state in ("ready", "training"):
            if group.state == "ready":
                p.offer_ready(group)
            p.changes.note(uid)
    return reply


def clear(ledger: Ledger, m: Clear, now: float) -> Ok:
    """Remove plain rows, and prompts of dead groups (which can then not be replayed). Those of other groups go with
    CommitStep or Drop; unknown keys are no error."""
    p = ledger.partition(m.partition)
    rows = [p.rows.ids[key] for key in m.keys if key in p.rows.ids]
    if m.rows:
        rows += [row for row in p.rows.order.find(unpacked(m.rows)).tolist() if row >= 0]
    rows = list(dict.fromkeys(rows))
    owners = {p.rows.keys[row]: owner for row in rows if (owner := p.rows.owner[row]) is not None}
    owned = [key for key, owner in owners.items() if owner.state not in ("trained", "dead")]
    if owned:
        raise Conflict(f"{some(owned)} belong to groups that are not done; ack or drop the groups instead")
    p.rows.erase([row for row in rows if p.rows.owner[row] is None])
    for owner in owners.values():
        if owner.state == "dead":
            p.forget_letter(owner.uid)
    return Ok()


# --- checks: nothing is changed here ---------------------------------------------------------------------------------


def _check_form(m: Commit) -> list[bytes] | None:
    """The tags, packed."""
    check_name("partition", m.partition)
    check_unique("key", m.keys)
    check_unique("session end", [(close.uid, close.session) for close in m.closes])
    if m.blocks and not m.keys:
        raise Invalid("a commit with columns needs keys")
    check_blocks(m.blocks, len(m.keys))
    check_names("key", m.keys)
    if m.tags is None:
        return None
    if len(m.tags) != len(m.keys):
        raise Invalid(f"{len(m.tags)} tags for {len(m.keys)} keys")
    return pack_all(m.keys, m.tags)


def _plan_rows(p: Partition, m: Commit, lease: HeldLease | None, tags: list[bytes] | None) -> _Plan:
    if m.rows:
        _check_rows(p, m)
    rows = list(map(p.rows.ids.get, m.keys))
    plan = _Plan(rows, tags, [])
    if lease is None and not p.groups and not p.seen:  # plain rows, as nearly all of a key-value user's
        plan.places = [None] * len(rows)
        return plan
    for key, row, tag in zip(m.keys, rows, tags or repeat(EMPTY), strict=False):
        place = _place(p, key, row, lease)
        if place is not None:
            _check_write(p, key, row is None, *place, lease)
            if m.closes:
                plan.keys.setdefault((place[0].uid, place[1]), {})[key] = len(tag)
        elif lease is not None:
            raise _no_group(key, lease)
        plan.places.append(place)
    return plan


def _no_group(key: str, lease: HeldLease) -> Invalid:
    """The key says of which group and session a row is; else it is a plain row."""
    uids = [uid for uid in lease.groups if key.startswith(f"{uid}_")] or list(lease.groups)
    return Invalid(
        f"{key!r} belongs to no group of lease {_name(lease)} ({lease.task.name!r}): rows of a group have keys "
        f"'<uid>_<session>_<index>', as {row_key(uids[0], 0)!r}, which transfer_queue.keys.row_key makes; "
        "commit plain rows apart, without token"
    )


def _check_rows(p: Partition, m: Commit) -> None:
    """The rows that the writer means are the ones that have the keys now."""
    rows = p.rows.order.require(unpacked(m.rows), p.name)
    if [p.rows.keys[row] for row in rows.tolist()] != m.keys:
        raise Invalid(f"{len(m.keys)} keys and {len(rows)} serials do not name the same rows")


def _place(p: Partition, key: str, row: int | None, lease: HeldLease | None) -> tuple[Group, int | None] | None:
    """The group and session (None: the prompt) a key belongs to; None for a plain row."""
    if row is not None:
        group = p.rows.owner[row]
        if group is None:
            return None
        if group.state != "dead":
            return group, None if row == group.prompt else split_row_key(key).session
    parts = try_split_row_key(key)
    uid, session = (parts.uid, parts.session) if parts is not None else (key, None)
    group = p.groups.get(uid)
    if group is not None:
        return group, session
    if uid in p.seen:
        text = f"{key!r} comes too late: group {uid!r} has ended. Forget it"
        raise Fenced(text) if lease is not None else Conflict(text)
    return None


def _check_write(p: Partition, key: str, new: bool, group: Group, session: int | None, lease: HeldLease | None) -> None:
    if lease is not None and group.lease is not lease:
        raise Fenced(f"{key!r}: lease {_name(lease)} does not cover group {group.uid!r} ({group.state}). Forget it")
    if group.state == "trained":
        raise Conflict(f"{key!r} comes too late: group {group.uid!r} is trained")
    if session is None:
        return
    if new and not 0 <= session < group.n:
        raise Conflict(f"{key!r}: group {group.uid!r} has {group.n} sessions")
    by_generator = lease is not None and lease.task.stage == "prompt"
    if group.is_closed(session) and (new or by_generator):
        raise Conflict(f"{key!r} comes too late: session {session} of group {group.uid!r} is closed")


def _merge_tags(p: Partition, m: Commit, plan: _Plan) -> bool:
    """Whether one of the rows will have another tag than this message gives it; the plan's tags are then as they will
    be. Raises Invalid if one of them, or the answer that tells them, would be too large."""
    old = [EMPTY if row is None else p.rows.tags[row] for row in plan.rows]
    if old.count(EMPTY) == len(old):
        return False
    plan.tags = list(map(merge, old, plan.tags or repeat(EMPTY)))
    for key, tag in zip(m.keys, plan.tags, strict=True):
        check_size(key, tag)
    check_sizes(f"a put of {len(m.keys)} rows", plan.tags)
    if m.tags is not None:
        _check_closed(p, plan)
    return True


def _check_closed(p: Partition, plan: _Plan) -> None:
    """Tags of closed sessions grow no further than can be told."""
    sizes = {row: len(tag) for row, tag in zip(plan.rows, plan.tags or (), strict=True) if row is not None}
    for place in dict.fromkeys(plan.places):
        group, session = place or (None, None)
        if group is None or session is None or not group.is_closed(session):
            continue
        rows, tags = group.rows_of(session), p.rows.tags
        nbytes = sum([ROW + len(p.rows.keys[row]) + sizes.get(row, len(tags[row])) for row in rows])
        check_told(group, session, nbytes)


def _check_close(p: Partition, plan: _Plan, lease: HeldLease | None, close: SessionClose) -> None:
    group = p.groups.get(close.uid)
    what = f"end of session {close.session} of group {close.uid!r}"
    if group is None:
        text = f"{what}: the partition {p.name!r} has no such group, or it has ended. Forget it"
        raise Fenced(text) if lease is not None else Conflict(text)
    if group.lease is not lease:
        holder = group.lease.holder if group.lease is not None else "nobody"
        text = f"{what}: the group is leased to {holder!r}"
        raise Fenced(f"{text}, not under the token given. Forget it") if lease else Conflict(f"{text}; give its token")
    if not 0 <= close.session < group.n:
        raise Invalid(f"{what}: the group has {group.n} sessions")
    if group.is_closed(close.session):
        raise Conflict(f"{what}: it is closed already")
    if not close.failed:
        _check_close_rows(p, plan, group, close, what)


def _check_close_rows(p: Partition, plan: _Plan, group: Group, close: SessionClose, what: str) -> None:
    if not close.rows:
        raise Invalid(f"{what}: a session that succeeded has at least one row; give `failed` for one that did not")
    check_unique(f"row in the {what}", close.rows)
    known = plan.keys.get((group.uid, close.session), {})
    missing = [key for key in close.rows if key not in known]
    if missing:
        before = {p.rows.keys[row] for row in group.open_rows.get(close.session, ())}
        missing = [key for key in missing if key not in before]
    if missing:
        raise Conflict(f"{what}: rows {some(missing)} were not committed before or with it")
    before = [row for row in map(p.rows.ids.get, close.rows) if row is not None]
    nbytes = sum([ROW + len(key) + known.get(key, 0) for key in close.rows])
    check_told(group, close.session, nbytes + sum([len(p.rows.tags[row]) for row in before]))


# --- changes: nothing is refused here --------------------------------------------------------------------------------


def _write(p: Partition, m: Commit, plan: _Plan) -> list[int]:
    """The rows."""
    rows = _rows(p, m, plan)
    if plan.tags:
        p.rows.set_tags(rows, plan.tags)
    p.rows.write(m.blocks, rows)
    return rows


def _rows(p: Partition, m: Commit, plan: _Plan) -> list[int]:
    """The row of each key, made if it is new."""
    new = [i for i, row in enumerate(plan.rows) if row is None]
    made = iter(p.rows.add(m.keys if len(new) == len(m.keys) else [m.keys[i] for i in new]))
    rows = [row if row is not None else next(made) for row in plan.rows]
    for i in new:
        place = plan.places[i]
        if place is not None:
            group, session = place
            p.rows.owner[rows[i]] = group
            if session is not None:
                group.open_rows.setdefault(session, []).append(rows[i])
    return rows


def _close(p: Partition, group: Group, close: SessionClose) -> None:
    """Rows of the session that its end does not list were given up by the writer."""
    rows = group.open_rows.pop(close.session, [])
    if close.failed:
        group.failures[close.session] = clipped(close.failed)
        p.rows.erase(rows)
        return
    kept = [p.rows.ids[key] for key in close.rows]
    group.closed[close.session] = kept
    p.rows.erase([row for row in rows if row not in kept])


def _after_close(p: Partition, group: Group, now: float) -> None:
    """The end of the last session ends the lease by itself."""
    if group.all_closed():
        p.leases.end(group)
        p.settle(group, now)
    else:
        p.changes.note(group.uid)


def _name(lease: HeldLease) -> str:
    return f"({lease.token.epoch}, {lease.token.counter})"
