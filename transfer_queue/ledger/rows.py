"""The rows of a partition: keys, tags, and where each of their fields lies."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.ledger.blocks import PutTable, Segments
from transfer_queue.ledger.fieldsets import NOTHING, FieldSets
from transfer_queue.ledger.order import RowOrder, Serials
from transfer_queue.ledger.places import Places, counts, same, set_places
from transfer_queue.ledger.tag_columns import TagColumns
from transfer_queue.ledger.tags import EMPTY
from transfer_queue.net.messages import Block

if TYPE_CHECKING:
    from transfer_queue.ledger.groups import Group

FIRST_CAPACITY = 64

FEW = 16
"""So many rows are looked at one by one: that is quicker than making arrays of them."""

SLICE = 1 << 16
"""Rows in one section of a snapshot."""


class RowTable:
    """Rows by dense id, columnar. Ids are reused.

    A row has as many places as there are puts that it still has fields of; `places` are columns of these, and a new one
    is begun only for a row that has none free. So a row of one put, however many fields that has, takes 12 bytes here.

    Invariants: `ids` holds exactly the live rows; no two places of a row have a field in common; the puts know how many
    rows have a place in them. Tags are packed (tags.py), and replaced, never changed in place.
    """

    def __init__(self, segments: Segments, serials: Serials) -> None:
        self.order = RowOrder(serials)
        self.ids: dict[str, int] = {}
        self.keys: list[str] = []
        self.tags: list[bytes] = []
        self.tag_columns = TagColumns()
        self.largest_tag = len(EMPTY)  # bytes, of all that there ever were in this life of the controller
        self.owner: list[Group | None] = []
        self.sets = FieldSets()
        self.puts = PutTable(self.sets, segments)
        self.places: list[Places] = []
        self.touched = 0  # rows made or written so far, in this life of the controller
        self._free = array("i")
        self._capacity = FIRST_CAPACITY

    @property
    def nbytes(self) -> int:
        """Live bytes."""
        return self.puts.nbytes

    def add(self, keys: Sequence[str], owner: Group | None = None) -> list[int]:
        """New rows without fields and with empty tags; their ids."""
        if not keys:
            return []
        self.touched += len(keys)
        if len(keys) == 1 and not self._free:
            return self._add_one(keys[0], owner)
        reused = min(len(keys), len(self._free))
        rows = [self._free.pop() for _ in range(reused)]
        for row, key in zip(rows, keys, strict=False):
            self.keys[row], self.owner[row] = key, owner
        self.tag_columns.forget(rows)
        if reused < len(keys):
            first, more = len(self.keys), len(keys) - reused
            rows += range(first, first + more)
            self.keys += keys[reused:]
            self.tags += [EMPTY] * more
            self.owner += [owner] * more
            if first + more > self._capacity:
                self._grow(first + more)
        self.ids.update(zip(keys, rows, strict=True))
        self.order.add(rows)
        return rows

    def set_tags(self, rows: Sequence[int], tags: Sequence[bytes]) -> None:
        mine = self.tags
        for row, tag in zip(rows, tags, strict=True):
            mine[row] = tag
        self.largest_tag = max(self.largest_tag, max(map(len, tags), default=0))
        self.tag_columns.forget(rows)

    def write(self, blocks: Sequence[Block], rows: Sequence[int], index: Sequence[int] | None = None) -> None:
        """The fields of `blocks`, one put, now lie there for `rows`, at `index` in them (default: 0, 1, 2, ...)."""
        if not rows or not blocks:
            return
        self.touched += len(rows)
        put = self.puts.add(blocks, len(rows))
        mask = self.puts.layout(put).mask
        if len(rows) == 1:
            self._write_one(put, mask, rows[0], 0 if index is None else index[0])
            return
        at = np.asarray(rows, np.int32)
        index_ = np.arange(len(rows), dtype=np.int32) if index is None else np.asarray(index, np.int32)
        fields = self.sets.number(mask)
        for places in self.places:
            self._take(places, at, mask)
        for places in self.places:
            free = places.fields[at] == NOTHING
            if free.all():
                return set_places(places, at, fields, put, index_)
            if free.any():
                set_places(places, at[free], fields, put, index_[free])
                at, index_ = at[~free], index_[~free]
        set_places(self._new_places(), at, fields, put, index_)

    def erase(self, rows: Sequence[int]) -> None:
        """Remove rows with all their fields."""
        if not rows:
            return
        self.strip(rows)
        self.order.erase(np.asarray(rows, np.int64))
        for row in rows:
            del self.ids[self.keys[row]]
            self.keys[row], self.tags[row], self.owner[row] = "", EMPTY, None
        self._free.extend(rows)

    def strip(self, rows: Sequence[int], fields: Iterable[str] | None = None) -> None:
        """Remove fields of rows (None: all); their keys and tags stay."""
        if not rows:
            return
        at, mask = np.asarray(rows, np.int32), -1
        if fields is not None:
            mask = 0
            for field in fields:
                mask |= self.sets.bit(field)
        for places in self.places:
            self._take(places, at, mask)

    # --- asking ---------------------------------------------------------------------------------------------------

    def have(self, fields: Iterable[str], rows: Sequence[int]) -> bool:
        """Whether all rows have all the fields."""
        wanted = 0
        for field in fields:
            bit = self.sets.bit(field)
            if not bit:
                return not rows
            wanted |= bit
        return not rows or self._common(rows) & wanted == wanted

    def has(self, field: str, rows: np.ndarray) -> np.ndarray:
        """bool per row: whether it has the field."""
        bit = self.sets.bit(field)
        found = np.zeros(len(rows), bool)
        if bit:
            having = np.fromiter((mask & bit > 0 for mask in self.sets.bits), bool, len(self.sets.bits))
            for places in self.places:
                found |= having[places.fields[rows]]
        return found

    def fields(self) -> list[str]:
        """All fields that some row had, sorted."""
        return sorted(self.sets.names)

    def counts(self) -> dict[str, int]:
        """How many rows have each field."""
        totals = dict.fromkeys(self.fields(), 0)
        for places in self.places:
            numbers = np.bincount(places.fields[: len(self.keys)])
            for number in np.flatnonzero(numbers).tolist():
                for name in self.sets.members(self.sets.bits[number]):
                    totals[name] += int(numbers[number])
        return totals

    def common_fields(self, rows: Sequence[int]) -> list[str]:
        """The fields that all rows have, sorted."""
        return self.sets.members(self._common(rows)) if rows else []

    def locate(self, fields: Iterable[str], rows: Sequence[int]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Per field the put of each row (-1: it has no such field) and the row in it; the very same arrays for fields
        that lie together."""
        if not len(rows):
            return
        at = np.asarray(rows, np.int32)
        found = [(places.fields[at], places) for places in self.places]
        whole = [(self.sets.bits[sets[0]], places.put[at], places.index[at]) for sets, places in found if same(sets)]
        for field in fields:
            bit = self.sets.bit(field)
            place = next(((put, index) for mask, put, index in whole if mask & bit), None)
            put, index = place if place is not None else self._mixed(bit, at, found)
            yield field, put, index

    def locate_one(self, row: int, fields: Sequence[str]) -> Iterator[tuple[int, int, list[str]]]:
        """By put, the row in it and those of the fields that the row has there."""
        for places in self.places:
            mask = self.sets.bits[places.fields.item(row)]
            here = [field for field in fields if mask & self.sets.bit(field)]
            if here:
                yield places.put.item(row), places.index.item(row), here

    def block_of(self, row: int, field: str) -> tuple[Block, int] | None:
        """The block in which a field of a row lies, and the row in it; None if the row has no such field."""
        bit = self.sets.bit(field)
        for places in self.places:
            if self.sets.bits[places.fields[row]] & bit:
                return self.puts.block(int(places.put[row]), field), int(places.index[row])
        return None

    def fields_of(self, row: int) -> list[str]:
        """The fields of one row, sorted."""
        return self.sets.members(self._mask(row))

    def rows_in(self, segments: Iterable[int]) -> list[int]:
        """The rows that have a field in any of these segments. Looks at all rows: for the loss of a unit only."""
        lost = self.puts.in_segments(segments)
        if not lost:
            return []
        rows: set[int] = set()
        for places in self.places:
            hit = np.isin(places.put, np.fromiter(lost, np.int32)) & (places.fields != NOTHING)
            for row in np.flatnonzero(hit).tolist():
                if self.sets.bits[places.fields[row]] & lost[int(places.put[row])]:
                    rows.add(row)
        return sorted(rows)

    # --- snapshots ------------------------------------------------------------------------------------------------

    def dump(self) -> Iterator[list[Any]]:
        """In slices, for `load`; owners are not in it. See transfer_queue/ledger/dump.py."""
        count = len(self.keys)
        order = np.fromiter(self.ids.values(), np.int32, len(self.ids))
        serials, rows = self.order.after(-1)
        yield ["sets", self.sets.dump()]
        for section in self.puts.dump():
            yield ["puts", section]
        yield ["table", len(self.places), self._free.tobytes()]
        for at in range(0, count, SLICE):
            end = min(at + SLICE, count)
            places = [[each[at:end].tobytes() for each in (p.fields, p.put, p.index)] for p in self.places]
            yield ["rows", self.keys[at:end], self.tags[at:end], places]
        if len(order) < count or (order[1:] < order[:-1]).any():
            yield ["keys", order.tobytes()]
        yield ["serials", serials.tobytes(), rows.astype(np.int32).tobytes()]

    def load(self, section: list[Any]) -> None:
        match section:
            case ["sets", sets]:
                self.sets.load(sets)
            case ["puts", puts]:
                self.puts.load(puts)
            case ["table", places, free]:
                self.places = [Places(self._capacity) for _ in range(places)]
                self._free.frombytes(free)
            case ["rows", keys, tags, places]:
                self._load_rows(keys, tags, places)
            case ["keys", order]:
                rows = np.frombuffer(order, np.int32).tolist()
                self.ids = {self.keys[row]: row for row in rows}
            case ["serials", serials, rows]:
                self.order.load(np.frombuffer(serials, np.int64), np.frombuffer(rows, np.int32))

    def _load_rows(self, keys: list[str], tags: list[bytes], places: list[list[bytes]]) -> None:
        first, end = len(self.keys), len(self.keys) + len(keys)
        self.keys += keys
        self.tags += tags
        self.largest_tag = max(self.largest_tag, max(map(len, tags), default=0))
        self.owner += [None] * len(keys)
        if end > self._capacity:
            self._grow(end)
        for into, parts in zip(self.places, places, strict=True):
            for values, part in zip((into.fields, into.put, into.index), parts, strict=True):
                values[first:end] = np.frombuffer(part, np.int32)
        self.ids.update(zip(keys, range(first, end), strict=True))

    # --- inside ---------------------------------------------------------------------------------------------------

    def _add_one(self, key: str, owner: Group | None) -> list[int]:
        row = len(self.keys)
        self.keys.append(key)
        self.tags.append(EMPTY)
        self.owner.append(owner)
        if row >= self._capacity:
            self._grow(row + 1)
        self.ids[key] = row
        rows = [row]
        self.order.add(rows)
        return rows

    def _write_one(self, put: int, mask: int, row: int, index: int) -> None:
        """`write` for an agent's commit: several times quicker than with arrays of one."""
        free: Places | None = None
        for places in self.places:
            had = places.fields.item(row)
            if had:
                bits = self.sets.bits[had]
                if bits & mask:
                    self._leave(places, row, bits, mask)
                    had = places.fields.item(row)
            if not had and free is None:
                free = places
        free = free or self._new_places()
        free.fields[row], free.put[row], free.index[row] = self.sets.number(mask), put, index

    def _leave(self, places: Places, row: int, bits: int, mask: int) -> None:
        left = bits & ~mask
        places.fields[row] = self.sets.number(left)
        if left:
            self.puts.mask(places.put.item(row), 1, bits & mask)
        else:
            self.puts.release(places.put.item(row), 1, bits)

    def _take(self, places: Places, at: np.ndarray, mask: int) -> None:
        """Rows no longer have the fields of `mask` from there."""
        had = places.fields[at]
        for number in had[:1].tolist() if same(had) else np.unique(had).tolist():
            bits = self.sets.bits[number]
            if not bits & mask:
                continue
            rows = at[had == number]
            left = bits & ~mask
            places.fields[rows] = self.sets.number(left)
            for put, count in counts(places.put[rows]):
                if left:
                    self.puts.mask(put, count, bits & mask)
                else:
                    self.puts.release(put, count, bits)

    def _common(self, rows: Sequence[int]) -> int:
        """The mask of the fields that all rows (at least one) have."""
        if len(rows) <= FEW:
            common = -1
            for row in rows:
                common &= self._mask(row)
            return common
        at = np.asarray(rows, np.int32)
        found = [places.fields[at] for places in self.places]
        if all(map(same, found)):
            return sum(self.sets.bits[sets[0]] for sets in found)
        patterns = np.unique(np.stack(found), axis=1)
        common = -1
        for pattern in patterns.T.tolist():
            common &= sum(self.sets.bits[number] for number in pattern)
        return common

    def _mask(self, row: int) -> int:
        mask = 0
        for places in self.places:
            mask |= self.sets.bits[places.fields.item(row)]
        return mask

    def _mixed(self, bit: int, at: np.ndarray, found: list[tuple[np.ndarray, Places]]) -> tuple[np.ndarray, np.ndarray]:
        """Where a field lies for rows that have it from several columns of places."""
        having = np.fromiter((mask & bit > 0 for mask in self.sets.bits), bool, len(self.sets.bits))
        put, index = np.full(len(at), -1, np.int32), np.zeros(len(at), np.int32)
        for sets, places in found:
            here = having[sets]
            put[here], index[here] = places.put[at[here]], places.index[at[here]]
        return put, index

    def _new_places(self) -> Places:
        self.places.append(Places(self._capacity))
        return self.places[-1]

    def _grow(self, rows: int) -> None:
        self._capacity = max(rows, self._capacity + self._capacity // 4)
        for places in self.places:
            places.resize(self._capacity)
