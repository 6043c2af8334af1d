"""Where bytes lie: the puts of a partition whose rows live, and what that keeps alive in each segment."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from transfer_queue.ledger.fieldsets import FieldSets
from transfer_queue.ledger.layouts import Layout
from transfer_queue.net.messages import Block

SLICE = 1 << 15
"""Puts in one section of a snapshot."""


@dataclass(slots=True)
class SegmentUse:
    """What lives in one segment. `end` is the highest byte that a block in it ever reached.

    `nbytes` counts live blocks whole, `live` only the share of their live rows. `puts` names, by partition, all puts
    with a live block here; one whose other blocks live elsewhere may stay listed.
    """

    nbytes: int = 0
    live: int = 0
    blocks: int = 0
    end: int = 0
    puts: dict[PutTable, set[int]] = field(default_factory=dict)


class Segments:
    """Live bytes by segment, over all partitions.

    Invariants: `use[s].nbytes` is the sum of `nbytes` over the live blocks in s, and `use[s].live` that of what
    `share` says of each; a segment without live block is not listed.
    """

    def __init__(self) -> None:
        self.use: dict[int, SegmentUse] = {}
        self._emptied: set[int] = set()
        self._thinned: set[int] = set()

    def add(self, table: PutTable, put: int, segment: int, end: int, nbytes: int, live: int, blocks: int = 1) -> None:
        use = self.use.get(segment)
        if use is None:
            use = self.use[segment] = SegmentUse()
        use.puts.setdefault(table, set()).add(put)
        use.nbytes += nbytes
        use.live += live
        use.blocks += blocks
        if end > use.end:
            use.end = end

    def add_many(
        self, table: PutTable, puts: np.ndarray, segments: np.ndarray, ends: np.ndarray, nbytes: np.ndarray,
        live: np.ndarray,
    ) -> None:  # fmt: skip
        """`add` of one block for each put."""
        if not len(puts):
            return
        order = np.argsort(segments, kind="stable")
        found, starts = np.unique(segments[order], return_index=True)
        for segment, part in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
            use = self.use.setdefault(segment, SegmentUse())
            use.puts.setdefault(table, set()).update(puts[part].tolist())
            use.nbytes += int(nbytes[part].sum())
            use.live += int(live[part].sum())
            use.blocks += len(part)
            use.end = max(use.end, int(ends[part].max()))

    def thin(self, segment: int, live: int) -> None:
        """Rows of a block that had these bytes are gone; others live."""
        self.use[segment].live -= live
        self._thinned.add(segment)

    def remove(self, segment: int, nbytes: int, live: int) -> None:
        """A block is dead, with the last of its rows that had these live bytes."""
        use = self.use[segment]
        use.nbytes -= nbytes
        use.live -= live
        use.blocks -= 1
        self._thinned.add(segment)
        if not use.blocks:
            del self.use[segment]
            self._emptied.add(segment)

    def forget(self, table: PutTable, put: int, segment: int) -> None:
        """All blocks of a put are dead."""
        use = self.use.get(segment)
        if use is not None and (puts := use.puts.get(table)) is not None:
            puts.discard(put)
            if not puts:
                del use.puts[table]

    def take_emptied(self) -> set[int]:
        """Segments whose last live block died since the last call."""
        emptied, self._emptied = self._emptied, set()
        return {segment for segment in emptied if segment not in self.use}

    def take_thinned(self) -> set[int]:
        """Segments in which something died since the last call."""
        thinned, self._thinned = self._thinned, set()
        return thinned


def share(nbytes: Any, living: Any, rows: Any) -> Any:
    """Bytes of a block that count as live when so many of its rows do."""
    return nbytes * living // rows


class PutTable:
    """The blocks of one partition that rows point to, put by put.

    A row has at most one place in a put, for all the fields that it still has from it. Invariants: `rows[p]` counts the
    rows with a place in put p, `_less[p][i]` those of them that no longer have the field of its block i there; a block
    lives as long as a row has its field there; `nbytes` is the sum over all live blocks. Numbers are reused.
    """

    def __init__(self, sets: FieldSets, segments: Segments) -> None:
        self.nbytes = 0
        self.durability: Literal["memory", "spill", "journal"] = "spill"
        self.rows = array("i")
        self._layouts: list[Layout] = []
        self._by_kinds: dict[tuple, Layout] = {}
        self._layout: list[Layout | None] = []
        self._data: list[bytes] = []
        self._less: dict[int, list[int]] = {}
        self._free = array("i")
        self._sets = sets
        self._segments = segments

    @property
    def spills(self) -> bool:
        """Whether its segments in memory may go to disk."""
        return self.durability != "memory"

    def layout(self, put: int) -> Layout:
        layout = self._layout[put]
        assert layout is not None
        return layout

    def blocks(self, put: int, fields: Sequence[str] | None = None) -> list[Block]:
        """The blocks of a put for these fields, by default all; dead ones too."""
        return self.layout(put).blocks(self._data[put], fields)

    def block(self, put: int, name: str) -> Block:
        return self.blocks(put, [name])[0]

    def puts_in(self, segments: Iterable[int]) -> Iterator[int]:
        """The puts that may have a living block in any of these segments, each once, the oldest number first."""
        use = self._segments.use
        return iter(sorted(set().union(*(use[s].puts.get(self, ()) for s in segments if s in use))))

    def living(self, put: int) -> list[Block]:
        """The blocks of a put that some row still has."""
        less, rows = self._less.get(put), self.rows[put]
        return [block for i, block in enumerate(self.blocks(put)) if less is None or less[i] < rows]

    def living_bytes(self, put: int, blocks: Iterable[Block]) -> int:
        """What these blocks of a put count as live, or a little more."""
        return sum(share(block.nbytes, self.rows[put], block.rows) for block in blocks)

    def add(self, blocks: Sequence[Block], rows: int) -> int:
        """Store the blocks (at least one) of a put, in which `rows` (at least 1) rows live; its number."""
        layout = self._layout_of(blocks)
        put = self._store(layout, layout.pack(blocks), rows)
        whole = rows == blocks[0].rows
        segment, end, nbytes, live, count = blocks[0].segment, 0, 0, 0, 0
        for block in blocks:  # mostly all in one segment
            if block.segment != segment:
                self._segments.add(self, put, segment, end, nbytes, live, count)
                segment, end, nbytes, live, count = block.segment, 0, 0, 0, 0
            size = block.nbytes
            if block.offset + size > end:
                end = block.offset + size
            nbytes += size
            live += size if whole else share(size, rows, block.rows)
            count += 1
            self.nbytes += size
        self._segments.add(self, put, segment, end, nbytes, live, count)
        return put

    def release(self, put: int, rows: int, had: int) -> None:
        """`rows` rows leave a put, of which they had the fields `had` (a mask); it dies with the last."""
        kinds = self.layout(put).kinds
        less = self._less.get(put)
        if less is None:
            self._leave(put, range(len(kinds)), rows)
        else:
            with_it = [bool(had & self._sets.bit(name)) for name, *_ in kinds]
            self._leave(put, [i for i, yes in enumerate(with_it) if yes], rows)
            for i, yes in enumerate(with_it):
                if not yes:
                    less[i] -= rows
        self.rows[put] -= rows
        if not self.rows[put]:
            self._forget(put)

    def mask(self, put: int, rows: int, lost: int) -> None:
        """`rows` rows of a put lose the fields `lost` (a mask), which they had, and keep others."""
        kinds = self.layout(put).kinds
        less = self._less.setdefault(put, [0] * len(kinds))
        losing = [i for i, (name, *_) in enumerate(kinds) if lost & self._sets.bit(name)]
        self._leave(put, losing, rows)
        for i in losing:
            less[i] += rows

    def in_segments(self, segments: Iterable[int]) -> dict[int, int]:
        """The puts with a block in any of `segments`, and the mask of the fields of these blocks."""
        lost = set(segments)
        found: dict[int, int] = {}
        for put in sorted(
            {put for s in lost if s in self._segments.use for put in self._segments.use[s].puts.get(self, ())}
        ):
            hit = [block.field for block in self.blocks(put) if block.segment in lost]
            found[put] = self._sets.mask(hit)
        return found

    def dump(self) -> Iterator[list[Any]]:
        """For `load`; see dump.py. By number: layout (-1: the number is free), the packed numbers, and the rows."""
        yield ["layouts", [layout.kinds for layout in self._layouts], self._free.tobytes(), list(self._less.items())]
        for at in range(0, len(self._data), SLICE):
            part = slice(at, at + SLICE)
            layouts = [-1 if layout is None else layout.number for layout in self._layout[part]]
            yield ["puts", layouts, self._data[part], self.rows[part].tobytes()]

    def load(self, section: list[Any]) -> None:
        match section:
            case ["layouts", kinds, free, less]:
                for kind in kinds:
                    self._new_layout([(name, form, dtype, dims) for name, form, dtype, dims in kind])
                self._free.frombytes(free)
                self._less = dict(less)
            case ["puts", layouts, data, rows]:
                first = len(self._data)
                self._layout += [None if number < 0 else self._layouts[number] for number in layouts]
                self._data += data
                self.rows.frombytes(rows)
                self._count(first, np.asarray(layouts, np.int32))

    # --- inside -------------------------------------------------------------------------------------------------

    def _count(self, first: int, layouts: np.ndarray) -> None:
        """Account the live blocks of loaded puts, from number `first` on."""
        for number in np.unique(layouts[layouts >= 0]).tolist():
            puts = np.flatnonzero(layouts == number) + first
            numbers = np.frombuffer(b"".join([self._data[put] for put in puts.tolist()]), np.uint64)
            numbers = numbers.reshape(len(puts), -1)
            less = [self._less.get(put) for put in puts.tolist()] if self._less else []
            rows = np.asarray(self.rows)[puts]
            for i, at in enumerate(self._layouts[number].starts[:-1]):
                living = rows
                if less:
                    living = rows - np.fromiter((counts[i] if counts else 0 for counts in less), np.int64, len(puts))
                here = living > 0
                segment, offset, nbytes = numbers[here, at : at + 3].T
                live = share(nbytes, living[here].astype(np.uint64), numbers[here, 0])
                self._segments.add_many(self, puts[here], segment, offset + nbytes, nbytes, live)
                self.nbytes += int(nbytes.sum())

    def _store(self, layout: Layout, data: bytes, rows: int) -> int:
        if self._free:
            put = self._free.pop()
            self._layout[put], self._data[put], self.rows[put] = layout, data, rows
        else:
            put = len(self._data)
            self._layout.append(layout)
            self._data.append(data)
            self.rows.append(rows)
        return put

    def _leave(self, put: int, blocks: Iterable[int], rows: int) -> None:
        """`rows` rows are about to leave these blocks: account for it, and for those that die of it."""
        total, extents = self.layout(put).extents(self._data[put])
        less, living = self._less.get(put), self.rows[put]
        for i in blocks:
            segment, _, nbytes = extents[i]
            before = living if less is None else living - less[i]
            live = share(nbytes, before, total)
            if before > rows:
                self._segments.thin(segment, live - share(nbytes, before - rows, total))
            else:
                self.nbytes -= nbytes
                self._segments.remove(segment, nbytes, live)

    def _forget(self, put: int) -> None:
        for segment in {segment for segment, *_ in self.layout(put).extents(self._data[put])[1]}:
            self._segments.forget(self, put, segment)
        self._less.pop(put, None)
        self._layout[put], self._data[put] = None, b""
        self._free.append(put)

    def _layout_of(self, blocks: Sequence[Block]) -> Layout:
        kinds = tuple([(b.field, b.kind, b.dtype, len(b.shape)) for b in blocks])
        found = self._by_kinds.get(kinds)
        return found if found is not None else self._new_layout(kinds)

    def _new_layout(self, kinds: Sequence[tuple[str, str, str, int]]) -> Layout:
        layout = Layout(len(self._layouts), kinds, self._sets.mask(name for name, *_ in kinds))
        self._layouts.append(layout)
        self._by_kinds[tuple(kinds)] = layout
        return layout
