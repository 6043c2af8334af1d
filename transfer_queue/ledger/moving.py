"""Survivors: rows in segments that are nearly empty are found, and get the place to which a unit has copied them.

A segment that is looked at here has been sealed: no put will ever lie in it again. So a put with a block there is known
by its number for as long as that block lives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from transfer_queue.errors import Invalid
from transfer_queue.ledger.blocks import PutTable
from transfer_queue.ledger.fieldsets import NOTHING
from transfer_queue.ledger.order import packed, unpacked
from transfer_queue.ledger.rows import RowTable
from transfer_queue.net.messages import Block, Move, Moved, Ok

if TYPE_CHECKING:
    from transfer_queue.ledger.ledger import Ledger

MAX_BLOCKS, MAX_ROWS = 512, 65536
"""Blocks and rows that are moved at once, so that neither the orders nor the finding of rows hold up the controller.
Of one put all blocks are."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that will lie in one put: `serials` (int64), from where (`puts`, `index`: int32), and by put its blocks and
    the rows in it."""

    serials: np.ndarray
    puts: np.ndarray
    index: np.ndarray
    sources: list[tuple[list[Block], np.ndarray]]

    def nbytes(self) -> int:
        """About what they take."""
        return sum(b.nbytes * len(index) // b.rows for blocks, index in self.sources for b in blocks)

    def moved(self, blocks: list[Block]) -> Moved:
        """They lie in these blocks now."""
        return Moved(packed(self.serials), _int32(self.puts), _int32(self.index), blocks)


def survivors(rows: RowTable, segments: Collection[int], nbytes: int) -> list[Batch]:
    """The rows in `segments`, those of about `nbytes` at most; in one batch what is of one kind. Looks at the places of
    all rows of the partition, which takes milliseconds for a million."""
    chosen = _choose(rows.puts, segments, nbytes)
    if not chosen:
        return []
    flags = np.zeros(len(rows.puts.rows), bool)
    flags[list(chosen)] = True
    batches: dict[tuple, list[tuple[int, list[Block], np.ndarray, np.ndarray]]] = {}
    for places in rows.places:
        here = np.flatnonzero(flags[places.put])
        here = here[places.fields[here] != NOTHING]
        if not len(here):
            continue
        kinds = places.put[here].astype(np.int64) << 32 | places.fields[here]
        order = np.lexsort((places.index[here], kinds))
        here, kinds = here[order], kinds[order]
        found, starts = np.unique(kinds, return_index=True)
        for kind, part in zip(found.tolist(), np.split(here, starts[1:]), strict=True):
            put, fields = kind >> 32, rows.sets.bits[kind & 0xFFFFFFFF]
            living, most = chosen[put]
            blocks = [block for block in living if fields & rows.sets.bit(block.field)]
            if blocks:
                part = part[:most]
                alike = tuple((b.field, b.kind, b.dtype, b.shape) for b in blocks)
                batches.setdefault(alike, []).append((put, blocks, part, places.index[part]))
    return [_batch(rows, parts) for parts in batches.values()]


def move(ledger: Ledger, m: Move, now: float) -> Ok:
    """Rows that were written anew or cleared since they were copied are left alone."""
    p = ledger.partition(m.partition)
    for moved in m.moved:
        serials, puts, index = unpacked(moved.rows), _numbers(moved.puts), _numbers(moved.index)
        if not len(serials) == len(puts) == len(index) or any(b.rows != len(serials) for b in moved.blocks):
            raise Invalid(f"a move of {len(serials)} rows with {len(puts)} and {len(index)} places")
        ids = p.rows.order.find(serials)
        here = np.flatnonzero(_stand(p.rows, ids, puts, index, moved.blocks, set(m.segments)))
        p.rows.write(moved.blocks, ids[here].tolist(), here.tolist())
    return Ok()


def _choose(table: PutTable, segments: Collection[int], nbytes: int) -> dict[int, tuple[list[Block], int]]:
    """Puts to be moved, with their living blocks in `segments`, and how many rows of each at most."""
    chosen: dict[int, tuple[list[Block], int]] = {}
    count = rows = size = 0
    for put in table.puts_in(segments):
        blocks = [block for block in table.living(put) if block.segment in segments]
        if not blocks:
            continue
        mine = max(1, table.living_bytes(put, blocks))
        most = max(1, min(MAX_ROWS, table.rows[put] * nbytes // mine))
        count += len(blocks)
        rows += min(most, table.rows[put])
        size += min(mine, nbytes)
        if chosen and (count > MAX_BLOCKS or rows > MAX_ROWS or size > nbytes):
            break
        chosen[put] = blocks, most
    return chosen


def _batch(rows: RowTable, parts: list[tuple[int, list[Block], np.ndarray, np.ndarray]]) -> Batch:
    puts = np.concatenate([np.full(len(part), put, np.int32) for put, _, part, _ in parts])
    index = np.concatenate([index for *_, index in parts])
    serials = rows.order.of(np.concatenate([part for _, _, part, _ in parts]))
    return Batch(serials, puts, index, [(blocks, index) for _, blocks, _, index in parts])


def _stand(
    rows: RowTable, ids: np.ndarray, puts: np.ndarray, index: np.ndarray, blocks: list[Block], segments: set[int]
) -> np.ndarray:
    """bool per row: whether it still has all fields of `blocks` from there."""
    mask = rows.sets.mask(block.field for block in blocks)
    having = np.fromiter((bits & mask == mask for bits in rows.sets.bits), bool, len(rows.sets.bits))
    known = {put for put in np.unique(puts).tolist() if _is_source(rows.puts, put, blocks, segments)}
    alive = (ids >= 0) & np.isin(puts, np.fromiter(known, np.int32, len(known)))
    at = np.where(alive, ids, 0)
    found = np.zeros(len(ids), bool)
    for places in rows.places:
        found |= (places.put[at] == puts) & (places.index[at] == index) & having[places.fields[at]]
    return found & alive


def _is_source(table: PutTable, put: int, blocks: list[Block], segments: set[int]) -> bool:
    if not 0 <= put < len(table.rows) or not table.rows[put]:
        return False
    place = {block.field: block.segment for block in table.blocks(put)}
    return all(place.get(block.field) in segments for block in blocks)


def _int32(values: np.ndarray) -> bytes:
    return values.astype("<i4").tobytes()


def _numbers(data: bytes) -> np.ndarray:
    if len(data) % 4:
        raise Invalid(f"places are 4 bytes each, got {len(data)} bytes")
    return np.frombuffer(data, "<i4")


def split(batch: Batch) -> Iterator[tuple[list[Block], bytes]]:
    """The sources of a batch as they are in messages."""
    return ((blocks, _int32(index)) for blocks, index in batch.sources)
