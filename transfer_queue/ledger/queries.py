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
from transfer_queue.ledger.tags import shown
from transfer_queue.net.messages import Block, Changes, FieldPlace, Located, PartitionStats, Tag

MAX_CHANGES = 256
"""Changed groups in one answer: about a millisecond. Who asks on from its number gets the next."""


def lookup(p: Partition, keys: Sequence[str], fields: Sequence[str] | None) -> Located:
    """Where rows lie; keys that are missing or hidden are left out. Raises NotFound for a field that a row lacks."""
    found = [(key, row) for key in keys if (row := p.rows.ids.get(key)) is not None and not hidden(p, row)]
    rows = [row for _, row in found]
    names = p.rows.common_fields(rows) if fields is None else list(dict.fromkeys(fields))
    if rows and not p.rows.have(names, rows):
        for name in names:
            lacking = [key for key, row in found if not p.rows.have([name], [row])]
            if lacking:
                raise NotFound(
                    f"field {name!r} is not there (yet) for rows {some(lacking)} of partition {p.name!r}; all rows "
                    f"asked for have {p.rows.common_fields(rows)}"
                )
    return _located(p, rows, names if rows else ())


def placed(p: Partition, rows: np.ndarray, names: Sequence[str]) -> Located:
    """Where those of these fields lie that some row has; the block is -1 where one has not."""
    return _located(p, rows.tolist(), [name for name in names if p.rows.has(name, rows).any()])


def _located(p: Partition, rows: list[int], names: Sequence[str]) -> Located:
    """Each put is unpacked once, and fields that lie together share the work."""
    blocks: list[Block] = []
    places: list[FieldPlace] = []
    first: dict[int, int] = {}  # put -> where its blocks begin in `blocks`
    seen: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, bytes]] = {}
    for name, put, index in p.rows.locate(names, rows):
        if id(put) not in seen:
            seen[id(put)] = (put, *_distinct(put), _packed(index))
        _, used, which, packed_index = seen[id(put)]
        begin = np.empty(len(used), np.int64)
        for i, number in enumerate(used.tolist()):
            if number >= 0 and number not in first:
                first[number] = len(blocks)
                blocks += p.rows.puts.blocks(number)
            begin[i] = first[number] + p.rows.puts.layout(number).place[name] if number >= 0 else -1
        places.append(FieldPlace(name, _packed(begin[which]), packed_index))
    tags = [shown(p.rows.tags[row]) for row in rows]
    return Located(keys=[p.rows.keys[row] for row in rows], tags=tags, blocks=blocks, places=places)


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
    """`listing` in pieces of `size` rows, of those that there are now; at least one piece."""
    rows = list(p.rows.ids.values())

    def part(at: int) -> dict[str, Tag]:
        here = [(p.rows.keys[row], row) for row in rows[at : at + size]]
        shows = ((key, row) for key, row in here if p.rows.ids.get(key) == row and not key.startswith(UNNAMED))
        return {key: shown(p.rows.tags[row]) for key, row in shows if not hidden(p, row)}

    return map(part, range(0, max(1, len(rows)), size))


def snapshot_parts(p: Partition, size: int) -> Iterator[Changes]:
    """A snapshot in pieces of `size` groups, of those that there are now, as they are when their turn comes."""
    live = list(chain.from_iterable(p.by_state[state].values() for state in OUTSTANDING))
    seq = p.changes.seq

    def part(at: int) -> Changes:
        still = (g for g in live[at : at + size] if g.state in OUTSTANDING and p.groups.get(g.uid) is g)
        return Changes(seq=seq, groups=[p.view(group) for group in still], depth=p.depth(), snapshot=True)

    return map(part, range(0, max(1, len(live)), size))


def changes(p: Partition, since: int) -> Changes:
    """Groups that changed after `since`, the oldest changes if they are many (`seq` tells how far they go); all that
    are not ended if `since` is unknown, too long ago, or -1."""
    changed = p.changes.first(since, MAX_CHANGES)
    if changed is None:
        live = chain.from_iterable(p.by_state[state].values() for state in OUTSTANDING)
        groups = [p.view(group) for group in sorted(live, key=lambda group: (group.order, group.uid))]
        return Changes(seq=p.changes.seq, groups=groups, depth=p.depth(), snapshot=True)
    entries, seq = changed
    groups = [final if final is not None else p.view(p.groups[uid]) for uid, final in entries]
    return Changes(seq=seq, groups=groups, depth=p.depth())


def stats(p: Partition, now: float) -> PartitionStats:
    oldest = {state: next(iter(groups.values())).since for state, groups in p.by_state.items() if groups}
    outstanding = chain.from_iterable(p.by_state[state].values() for state in OUTSTANDING)
    return PartitionStats(
        depth=p.depth(),
        rows=len(p.rows.ids),
        nbytes=p.rows.nbytes,
        next_order=p.next_order,
        dropped=dict(p.dropped),
        redelivered=p.redelivered,
        dead=dict(p.dead),
        oldest_age={state: now - since for state, since in oldest.items()},
        outstanding=sorted(group.order for group in outstanding),
        max_groups=p.max_groups,
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
