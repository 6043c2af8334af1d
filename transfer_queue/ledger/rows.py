"""The rows of a partition: keys, tags, and where each of their fields lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from transfer_queue.ledger.blocks import BlockTable, Segments
from transfer_queue.ledger.order import RowOrder, Serials
from transfer_queue.net.messages import Block, Tag

if TYPE_CHECKING:
    from transfer_queue.ledger.groups import Group

FIRST_CAPACITY = 64


@dataclass(slots=True)
class Place:
    """Where a field lies, by row id: number of the block (-1: the row has no such field) and row within it."""

    block: np.ndarray  # int32[capacity]
    index: np.ndarray  # int32[capacity]


class RowTable:
    """Rows by dense id, columnar: per field two arrays that grow geometrically. Ids are reused.

    Invariants: `ids` holds exactly the live rows; `places[f].block[r]` is -1 or a live block; the count of rows that
    the block table has for a block is the number of places that point to it. Tags are replaced, never changed in place,
    so they can be handed out.
    """

    def __init__(self, partition: str, segments: Segments, serials: Serials) -> None:
        self.order = RowOrder(serials)
        self.ids: dict[str, int] = {}
        self.keys: list[str] = []
        self.tags: list[Tag] = []
        self.owner: list[Group | None] = []
        self.places: dict[str, Place] = {}
        self.blocks = BlockTable(partition, segments)
        self._free: list[int] = []
        self._capacity = FIRST_CAPACITY

    def add(self, key: str, owner: Group | None) -> int:
        """A new row without fields and with an empty tag; its id."""
        if self._free:
            row = self._free.pop()
            self.keys[row], self.tags[row], self.owner[row] = key, {}, owner
        else:
            row = len(self.keys)
            self.keys.append(key)
            self.tags.append({})
            self.owner.append(owner)
            if row == self._capacity:
                self._grow()
        self.ids[key] = row
        self.order.add(row)
        return row

    def write(self, block: Block, rows: Sequence[int], index: Sequence[int] | None = None) -> None:
        """The field of `block` now lies there for `rows`, at `index` in the block (default: 0, 1, 2, ...)."""
        if not rows:
            return
        place = self.places.get(block.field)
        if place is None:
            place = self.places[block.field] = Place(*(np.full(self._capacity, -1, np.int32) for _ in range(2)))
        if len(rows) == 1:  # an agent's commit: several times quicker than with arrays of one
            row = rows[0]
            if place.block[row] >= 0:
                self.blocks.release(int(place.block[row]), 1)
            place.block[row] = self.blocks.add(block, 1)
            place.index[row] = 0 if index is None else index[0]
            return
        at = np.asarray(rows, np.int64)
        self._release(place.block[at])
        place.block[at] = self.blocks.add(block, len(rows))
        place.index[at] = np.arange(len(rows)) if index is None else np.asarray(index)

    def erase(self, rows: Sequence[int]) -> None:
        """Remove rows with all their fields. The cost is (rows erased) x (fields of the partition)."""
        if not rows:
            return
        self.strip(rows)
        self.order.erase(np.asarray(rows, np.int64))
        for row in rows:
            del self.ids[self.keys[row]]
            self.keys[row], self.tags[row], self.owner[row] = "", {}, None
        self._free.extend(rows)

    def strip(self, rows: Sequence[int]) -> None:
        """Remove all fields of rows; their keys and tags stay."""
        at = np.asarray(rows, np.int64)
        for place in self.places.values():
            self._release(place.block[at])
            place.block[at] = -1

    def have(self, field: str, rows: Sequence[int]) -> bool:
        """Whether all rows have the field."""
        place = self.places.get(field)
        if place is None:
            return not rows
        block = place.block
        if len(rows) < 8:  # indexing single elements is quicker than making an array
            return all(block[row] >= 0 for row in rows)
        return bool((block[np.asarray(rows, np.int64)] >= 0).all())

    def common_fields(self, rows: Sequence[int]) -> list[str]:
        """The fields that all rows have, sorted."""
        return sorted(field for field in self.places if self.have(field, rows)) if rows else []

    def rows_in(self, blocks: Sequence[int]) -> list[int]:
        """The rows that have a field in any of these blocks. Looks at all rows: for the loss of a unit only."""
        hit = np.zeros(self._capacity, bool)
        for place in self.places.values():
            hit |= np.isin(place.block, np.asarray(blocks, np.int32))
        return np.flatnonzero(hit).tolist()

    def _release(self, blocks: np.ndarray) -> None:
        if len(blocks) == 1:
            if blocks[0] >= 0:
                self.blocks.release(int(blocks[0]), 1)
            return
        for number, count in zip(*np.unique(blocks[blocks >= 0], return_counts=True), strict=True):
            self.blocks.release(int(number), int(count))

    def _grow(self) -> None:
        self._capacity *= 2
        for field, place in self.places.items():
            bigger = Place(*(np.full(self._capacity, -1, np.int32) for _ in range(2)))
            bigger.block[: len(place.block)] = place.block
            bigger.index[: len(place.index)] = place.index
            self.places[field] = bigger
