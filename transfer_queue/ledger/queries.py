"""What can be asked: where rows lie, which rows there are, what changed, how things stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from transfer_queue.errors import NotFound
from transfer_queue.keys import UNNAMED
from transfer_queue.ledger.checks import some
from transfer_queue.ledger.groups import OUTSTANDING
from transfer_queue.ledger.partition import Partition
from transfer_queue.ledger.tags import fitting, shown, shown_all
from transfer_queue.ledger.telling import fitting_groups
from transfer_queue.net.messages import Block, Changes, FieldPlace, Group, Located, PartitionStats, Tag

MAX_CHANGES = 256
"""Changed groups in one answer: about a millisecond. Who asks on from its number gets the next."""


def lookup(p: Partition, keys: Sequence[str], fields: Sequence[str] | None) -> Located:
    """Where rows lie; keys that are missing or hidden are left out. Raises NotFound for a field that a row lacks."""
    rows = [row for row in map(p.rows.ids.get, keys) if row is not None]
    if p.groups:
        rows = [row for row in rows if not hidden(p, row)]
    names = p.rows.common_fields(rows) if fields is None else list(dict.fromkeys(fields))
    if rows and not p.rows.have(names, rows):
        for name in names:
            lacking = [p.rows.keys[row] for row in rows if not p.rows.have([name], [row])]
            if lacking:
                raise NotFound(
                    f"field {name!r} is not there (yet) for rows {some(lacking)} of partition {p.name!r}; all rows "
                    f"asked for have {p.rows.common_fields(rows)}"
                )
    if len(rows) == 1:
        return _located_one(p, rows[0], names)
    return _located(p, rows, names if rows else ())


def placed(p: Partition, rows: np.ndarray, names: Sequence[str]) -> Located:
    """Where those of these fields lie that some row has; the block is -1 where one has not."""
    return _located(p, rows.tolist(), [name for name in names if p.rows.has(name, rows).any()])


def _located_one(p: Partition, row: int, names: Sequence[str]) -> Located:
    """Several times quicker than with arrays of one."""
    blocks: list[Block] = []
    places: dict[str, FieldPlace] = {}
    for put, index, fields in p.rows.locate_one(row, names):
        at = index.to_bytes(4, "little")
        for i, field in enumerate(fields, len(blocks)):
            places[field] = FieldPlace(field, i.to_bytes(4, "little"), at)
        blocks += p.rows.puts.blocks(put, fields)
    found = [places[name] for name in names if name in places]
    return Located(keys=[p.rows.keys[row]], tags=[shown(p.rows.tags[row])], blocks=blocks, places=found)


def _located(p: Partition, rows: list[int], names: Sequence[str]) -> Located:
    """Fields that lie together share the work."""
    together: dict[int, tuple[np.ndarray, np.ndarray, list[str]]] = {}
    for name, put, index in p.rows.locate(names, rows):
        together.setdefault(id(put), (put, index, []))[2].append(name)
    blocks: list[Block] = []
    places: dict[str, FieldPlace] = {}
    for put, index, fields in together.values():
        used, which = _distinct(put)
        begin = len(blocks) + len(fields) * (np.arange(len(used)) - int(used[0] < 0))
        for number in used.tolist():
            if number >= 0:
                blocks += p.rows.puts.blocks(number, fields)
        packed_index = _packed(index)
        for i, field in enumerate(fields):
            places[field] = FieldPlace(field, _packed(np.where(used < 0, -1, begin + i)[which]), packed_index)
    return Located(
        keys=list(map(p.rows.keys.__getitem__, rows)),
        tags=shown_all(map(p.rows.tags.__getitem__, rows)),
        blocks=blocks,
        places=[places[name] for name in names if name in places],
    )


def _distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values, and which of them each is."""
    if (values == values[0]).all():
        return values[:1], np.zeros(len(values), np.int64)
    return np.unique(values, return_inverse=True)


def listing(p: Partition) -> dict[str, Tag]:
    """Keys and tags of the visible rows."""
    visible = ((key, row) for key, row in p.rows.ids.items() if not (key.startswith(UNNAMED) or hidden(p, row)))
    return {key: shown(p.rows.tags[row]) for key, row in visible}


def listing_parts(p: Partition, size: int) -> Iterator[dict[str, Tag]]:
    """`listing` in pieces of `size` rows, or fewer with large tags, of those that there are now; at least one piece."""
    rows = list(p.rows.ids.values())

    def part(here: list[int]) -> dict[str, Tag]:
        shows = ((p.rows.keys[row], row) for row in here)
        shows = ((key, row) for key, row in shows if p.rows.ids.get(key) == row and not key.startswith(UNNAMED))
        return {key: shown(p.rows.tags[row]) for key, row in shows if not hidden(p, row)}

    def parts() -> Iterator[dict[str, Tag]]:
        at = 0
        while at < max(1, len(rows)):
            here = rows[at : at + size]
            here = here[: fitting(map(p.rows.tags.__getitem__, here))]
            at += max(1, len(here))
            yield part(here)

    return parts()


def snapshot_is_long(p: Partition, size: int) -> bool:
    """Whether a snapshot has more than `size` groups, or large ones."""
    if p.outstanding() > size:
        return True
    live = list(chain.from_iterable(p.by_state[state].values() for state in OUTSTANDING))
    return fitting_groups(p, live) < len(live)


def snapshot_parts(p: Partition, size: int) -> Iterator[Changes]:
    """A snapshot in pieces of `size` groups, or fewer large ones, of those that there are now, as they are when their
    turn comes; at least one piece."""
    live = list(chain.from_iterable(p.by_state[state].values() for state in OUTSTANDING))
    seq = p.changes.seq

    def parts() -> Iterator[Changes]:
        at = 0
        while at < max(1, len(live)):
            here = live[at : at + size]
            here = here[: fitting_groups(p, here)]
            at += max(1, len(here))
            still = [p.view(g) for g in here if g.state in OUTSTANDING and p.groups.get(g.uid) is g]
            yield Changes(seq=seq, groups=still, depth=p.depth(), snapshot=True)

    return parts()


def changes(p: Partition, since: int) -> Changes:
    """Groups that changed after `since`, the oldest changes if they are many or large (`seq` tells how far they go);
    all that are not ended if `since` is unknown, too long ago, or -1."""
    changed = p.changes.first(since, MAX_CHANGES)
    if changed is None:
        live = chain.from_iterable(p.by_state[state].values() for state in OUTSTANDING)
        groups = [p.view(group) for group in sorted(live, key=lambda group: (group.order, group.uid))]
        return Changes(seq=p.changes.seq, groups=groups, depth=p.depth(), snapshot=True)
    entries, seq = changed
    fitting = _fitting(p, entries)
    if fitting < len(entries):
        entries, seq = entries[:fitting], p.changes.number(entries[fitting - 1][0])
    groups = [final if final is not None else p.view(p.groups[uid]) for uid, final in entries]
    return Changes(seq=seq, groups=groups, depth=p.depth())


def _fitting(p: Partition, entries: Sequence[tuple[str, Group | None]]) -> int:
    """How many of the changes fit into one answer. Groups that have ended tell no rows: they count as nothing."""
    live = [i for i, (_, final) in enumerate(entries) if final is None]
    fitting = fitting_groups(p, [p.groups[entries[i][0]] for i in live])
    return live[fitting] if fitting < len(live) else len(entries)


def stats(p: Partition, now: float, *, orders: bool = False) -> PartitionStats:
    oldest = {state: next(iter(groups.values())).since for state, groups in p.by_state.items() if groups}
    outstanding = chain.from_iterable(p.by_state[state].values() for state in OUTSTANDING if orders)
    return PartitionStats(
        depth=p.depth(),
        rows=len(p.rows.ids),
        nbytes=p.rows.nbytes,
        next_order=p.next_order,
        dropped=dict(p.dropped),
        redelivered=p.redelivered,
        dead=dict(p.dead),
        oldest_age={state: now - since for state, since in oldest.items()},
        max_groups=p.max_groups,
        outstanding=sorted(group.order for group in outstanding),
        consumers=sorted(p.consumption.taken),
    )


def situation(p: Partition, now: float) -> str:
    """One line on how things stand, for the error of somebody who waited in vain."""
    parts: list[str] = []
    for state, count in p.depth().items():
        text = f"{state} {count}"
        group = next(iter(p.by_state[state].values()), None) if state in OUTSTANDING else None
        if group is not None:
            by = f", held by {group.lease.holder!r}" if group.lease is not None else ""
            why = f", {group.reason}" if group.reason else ""
            text += f" (oldest: {group.uid!r} for {now - group.since:.1f} s{by}{why})"
        parts.append(text)
    return "; ".join(parts)


def hidden(p: Partition, row: int) -> bool:
    """Whether the row's group was trained: readers do not see it."""
    owner = p.rows.owner[row]
    return owner is not None and owner.state == "trained"


def _packed(indices: np.ndarray) -> bytes:
    return indices.astype("<i4").tobytes()
