"""What can be asked: where rows lie, which rows there are, what changed, how things stand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from transfer_queue.errors import NotFound
from transfer_queue.keys import UNNAMED
from transfer_queue.ledger.checks import some
from transfer_queue.ledger.groups import OUTSTANDING
from transfer_queue.ledger.partition import Partition
from transfer_queue.net.messages import Changes, FieldPlace, Located, PartitionStats, Tag


def lookup(p: Partition, keys: Sequence[str], fields: Sequence[str] | None) -> Located:
    """Where rows lie; keys that are missing or hidden are left out. Raises NotFound for a field that a row lacks."""
    found = [(key, row) for key in keys if (row := p.rows.ids.get(key)) is not None and not hidden(p, row)]
    rows = [row for _, row in found]
    names = p.rows.common_fields(rows) if fields is None else list(dict.fromkeys(fields))
    at = np.asarray(rows, np.int64)
    block_of: dict[str, np.ndarray] = {}
    for name in names if rows else ():
        if not p.rows.have(name, rows):
            lacking = [key for key, row in found if not p.rows.have(name, [row])]
            raise NotFound(
                f"field {name!r} is not there (yet) for rows {some(lacking)} of partition {p.name!r}; all rows asked "
                f"for have {p.rows.common_fields(rows)}"
            )
        block_of[name] = p.rows.places[name].block[at]
    return _located(p, [key for key, _ in found], at, block_of)


def placed(p: Partition, rows: np.ndarray, names: Sequence[str]) -> Located:
    """Where those of these fields lie that some row has; the block is -1 where one has not."""
    block_of = {name: p.rows.places[name].block[rows] for name in names if name in p.rows.places}
    block_of = {name: block for name, block in block_of.items() if (block >= 0).any()}
    return _located(p, [p.rows.keys[row] for row in rows.tolist()], rows, block_of)


def _located(p: Partition, keys: list[str], rows: np.ndarray, block_of: dict[str, np.ndarray]) -> Located:
    used = np.unique(np.concatenate(list(block_of.values()))) if block_of else np.empty(0, np.int32)
    used = used[used >= 0]
    places = [
        FieldPlace(
            name,
            _packed(np.where(block >= 0, np.searchsorted(used, block), -1)),
            _packed(p.rows.places[name].index[rows]),
        )
        for name, block in block_of.items()
    ]
    blocks = [p.rows.blocks[number] for number in used.tolist()]
    return Located(keys=keys, tags=[p.rows.tags[row] for row in rows.tolist()], blocks=blocks, places=places)


def listing(p: Partition) -> dict[str, Tag]:
    """Keys and tags of the visible rows."""
    return {key: p.rows.tags[row] for key, row in p.rows.ids.items() if not (key.startswith(UNNAMED) or hidden(p, row))}


def changes(p: Partition, since: int) -> Changes:
    """Groups that changed after `since`; all that are not ended if that is unknown, too long ago, or -1."""
    changed = p.changes.after(since)
    if changed is None:
        live = chain.from_iterable(p.by_state[state].values() for state in OUTSTANDING)
        groups = [p.view(group) for group in sorted(live, key=lambda group: (group.order, group.uid))]
    else:
        groups = [final if final is not None else p.view(p.groups[uid]) for uid, final in changed]
    return Changes(seq=p.changes.seq, groups=groups, depth=p.depth(), snapshot=changed is None)


def stats(p: Partition, now: float) -> PartitionStats:
    oldest = {state: next(iter(groups.values())).since for state, groups in p.by_state.items() if groups}
    outstanding = chain.from_iterable(p.by_state[state].values() for state in OUTSTANDING)
    return PartitionStats(
        depth=p.depth(),
        rows=len(p.rows.ids),
        nbytes=p.rows.blocks.nbytes,
        next_order=p.next_order,
        dropped=dict(p.dropped),
        redelivered=p.redelivered,
        dead=dict(p.dead),
        oldest_age={state: now - since for state, since in oldest.items()},
        outstanding=sorted(group.order for group in outstanding),
        max_groups=p.max_groups,
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
