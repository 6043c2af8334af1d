"""Where a client's bytes go and come from: a write arena of granted segments, and a cache of read mappings.

put: place(sizes) -> extents, copy columns into them, commit, settle(extents); finished segments -> sealed()
get: block(b) -> its bytes in the mapping, copy rows out, check(blocks) that no segment was reused meanwhile
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from transfer_queue.errors import Corrupt, SegmentGone
from transfer_queue.net.messages import Block, Segment
from transfer_queue.storage.columns import ALIGN, Column, aligned
from transfer_queue.storage.segments import MAX_FILES, Mapping, OpenFile, unit_of

MAX_BEGUN = 3
"""Partly used segments of a writer: enough that a large block does not waste the room that small ones can use."""

FULL = 64
"""A segment of which less than this fraction is left is full."""

OWN = 8
"""A put that leaves less than this fraction of an unused segment was the reason for which it was made."""

CHUNK = 1 << 20
"""Bytes copied and hashed at a time: the digest then reads what the copy has brought into the cache. A smaller copy
goes through the cache on its way out too, at twice the cost."""

SMALL = 16 << 10
"""Bytes up to which a second copy costs less than what numpy does to save it."""

GOOD_PART = 4
"""One row in so many is a good part of a block: the digest of all then costs at most twice the copy of these."""

MAX_VERIFIED = 65536
"""Blocks whose digest this process remembers to have checked."""


@dataclass(slots=True)  # not frozen: there is one for each block of each put
class Extent:
    """A place in a granted segment: `data` is the mapping itself, or a private buffer that must be sent to the unit;
    None if it is written through `file`."""

    segment: int
    offset: int
    nbytes: int
    data: np.ndarray | None
    file: OpenFile | None = None

    def write(self, at: int, data: np.ndarray) -> None:
        """Put bytes (uint8) at `at` of this place."""
        if self.data is not None:
            self.data[at : at + len(data)] = data
        else:
            assert self.file is not None
            self.file.write_at(self.offset + at, data)


Target = np.ndarray | OpenFile | None
"""Where a granted segment is written: its memory, or its file; None if this client can do neither."""


@dataclass(slots=True, eq=False)
class _Granted:
    segment: Segment
    target: Target
    used: int = 0
    unsettled: int = 0
    recalled: bool = False

    def room(self) -> int:
        return self.segment.nbytes - self.used


class WriteArena:
    """Bump allocation in the segments granted to one writer.

    The blocks of a put go to the first segment with room for all of them, else to the first ones with room for each,
    else they want a segment of their own. A segment is finished when it is full, when more than MAX_BEGUN are partly
    used and it is the fullest, or when others need it: `sealed` reports it once nothing of it is being written; its
    tail is never used. Allocated space is not given back; it goes with its segment.
    """

    def __init__(self, open_segment: Callable[[Segment], Target]) -> None:
        self._open = open_segment
        self._granted: list[_Granted] = []
        self._finished: list[_Granted] = []
        self._reported: list[int] = []
        self.wanting = False  # a commit that asks for further segments is on its way: the others need not

    def add(self, segments: Iterable[Segment]) -> None:
        """Use further segments. One that is already gone again is given back at once."""
        for segment in segments:
            try:
                self._granted.append(_Granted(segment, self._open(segment)))
            except SegmentGone:
                self._reported.append(segment.segment)

    def room(self) -> int:
        """Bytes left over all segments (an upper bound for what fits)."""
        return sum(g.room() for g in self._granted)

    def place(self, sizes: Sequence[int]) -> list[Extent] | int:
        """One extent per size, 64-byte aligned; or, with nothing allocated, how many bytes one more segment needs."""
        total = sum(aligned(size) for size in sizes)
        granted = next((g for g in self._granted if g.room() >= total), None)
        plan = [granted] * len(sizes) if granted is not None else self._spread(sizes)
        if plan is None:
            return max(total, 1)
        own = granted is not None and not granted.used and OWN * (granted.room() - total) < granted.segment.nbytes
        extents = [_take(g, size) for g, size in zip(plan, sizes, strict=True)]
        if granted is not None and (own or FULL * granted.room() < granted.segment.nbytes):
            self._finish(granted)
        self._finish_fullest()
        return extents

    def settle(self, extents: Iterable[Extent]) -> None:
        """What was placed here is committed, or given up."""
        by_segment = {g.segment.segment: g for g in (*self._granted, *self._finished)}
        for extent in extents:
            granted = by_segment.get(extent.segment)
            if granted is not None:
                granted.unsettled -= 1

    def sealed(self, committing: Iterable[Block] = ()) -> list[int]:
        """Segments this writer has finished with since the last call, once the message that tells it has been accepted:
        `committing` are its blocks."""
        carried = Counter(block.segment for block in committing)
        done = [g for g in self._finished if g.unsettled == carried[g.segment.segment]]
        self._finished = [g for g in self._finished if g not in done]
        reported, self._reported = self._reported, []
        return reported + [g.segment.segment for g in done]

    def seal_again(self, segments: Iterable[int]) -> None:
        """The message that carried these from `sealed` was refused: report them once more."""
        self._reported += segments

    def recall(self, segments: Collection[int]) -> None:
        """Others need these: finish with them. Those of other writers are ignored."""
        for granted in [g for g in self._granted if g.segment.segment in segments]:
            self._finish(granted)
        for granted in self._finished:
            granted.recalled |= granted.segment.segment in segments

    def finish(self) -> None:
        """Nothing more is placed here."""
        for granted in list(self._granted):
            self._finish(granted)

    def owes(self) -> bool:
        """Whether somebody waits for what `sealed` would report now."""
        return any(g.recalled and not g.unsettled for g in self._finished)

    def give_up(self, units: set[int]) -> None:
        """A segment of these units turned out to be gone, as all are that were granted before: finish with them."""
        self._finished += [g for g in self._granted if g.segment.unit in units]
        self._granted = [g for g in self._granted if g.segment.unit not in units]

    def forget(self) -> None:
        """Never use the present segments again: their unit or the controller restarted. Without sealing them."""
        self._granted.clear()
        self._finished.clear()
        self._reported.clear()

    def _spread(self, sizes: Sequence[int]) -> list[_Granted] | None:
        """For each size the first segment with room; None if one finds none."""
        plan: list[_Granted] = []
        room = {id(g): g.room() for g in self._granted}
        for size in sizes:
            granted = next((g for g in self._granted if room[id(g)] >= size), None)
            if granted is None:
                return None
            plan.append(granted)
            room[id(granted)] -= aligned(size)
        return plan

    def _finish(self, granted: _Granted) -> None:
        self._granted.remove(granted)
        self._finished.append(granted)

    def _finish_fullest(self) -> None:
        """Of the segments begun, keep those with most room."""
        begun = [g for g in self._granted if g.used]
        if len(begun) > MAX_BEGUN:
            for granted in sorted(begun, key=_Granted.room)[:-MAX_BEGUN]:
                self._finish(granted)


def _take(granted: _Granted, size: int) -> Extent:
    offset, target = granted.used, granted.target
    granted.used = offset + -(-size // ALIGN) * ALIGN
    granted.unsettled += 1
    if type(target) is np.ndarray:
        return Extent(granted.segment.segment, offset, size, target[offset : offset + size])
    if target is None:
        return Extent(granted.segment.segment, offset, size, np.empty(size, np.uint8))
    assert isinstance(target, OpenFile)
    return Extent(granted.segment.segment, offset, size, None, target)


class ReadArena:
    """Read mappings of segments, checked blocks, and nothing else."""

    def __init__(self, open_segment: Callable[[int], Mapping]) -> None:
        self._open = open_segment
        self._mappings: OrderedDict[int, Mapping] = OrderedDict()
        self._verified: OrderedDict[tuple[str, int, int], None] = OrderedDict()

    def blocks(self, blocks: Iterable[Block], rows: Iterable[int]) -> list[memoryview]:
        """The bytes of each block, read-only. Raises SegmentGone or Corrupt (outside its segment, or another digest).

        The digest is checked when the rows of which a copy will be made are a good part of the block, and whenever this
        process reads the block there (in memory or on disk) for the first time: else a few rows of a large block would
        cost as much as all of it.
        """
        segment, path, memory, found = -1, "", memoryview(b""), []
        for block, count in zip(blocks, rows, strict=True):
            if block.segment != segment:
                mapping = self._mapping(block.segment)
                segment, path, memory = block.segment, mapping.path, mapping.data.data
            if block.offset + block.nbytes > len(memory):
                self.check([block])  # if the segment is still this file, `within` says what is wrong
            data = within(block, memory)
            if GOOD_PART * count >= block.rows:
                self._verify(block, data)
            elif (key := (path, block.offset, block.digest)) not in self._verified:
                self._verify(block, data)
                self._verified[key] = None
                if len(self._verified) > MAX_VERIFIED:
                    self._verified.popitem(last=False)
            found.append(data)
        return found

    def check(self, blocks: Iterable[Block]) -> None:
        """Raise SegmentGone if a segment was freed since it was mapped: what was copied may be other bytes."""
        gone = []
        for segment in {block.segment for block in blocks}:
            mapping = self._mappings.get(segment)
            if mapping is None or not mapping.stands():
                self._drop(segment)  # each of them now, or the next attempt would only come to the next one
                gone.append(segment)
        if gone:
            names = ", ".join(f"{segment:016x} of unit {unit_of(segment)}" for segment in sorted(gone)[:3])
            raise SegmentGone(f"{len(gone)} segments ({names}) were freed during the read")

    def sweep(self) -> None:
        """Let go of segments that are gone."""
        for segment in [s for s, mapping in self._mappings.items() if not mapping.stands()]:
            self._drop(segment)

    def clear(self) -> None:
        """Let go of all."""
        self._mappings.clear()

    def _mapping(self, segment: int) -> Mapping:
        mapping = self._mappings.get(segment)
        if mapping is None:
            mapping = self._mappings[segment] = self._open(segment)
            if len(self._mappings) > MAX_FILES:
                self._mappings.popitem(last=False)
        self._mappings.move_to_end(segment)
        return mapping

    def _verify(self, block: Block, data: memoryview) -> None:
        if xxhash.xxh3_64_intdigest(data) != block.digest:
            self.check([block])
            verify(block, data)

    def _drop(self, segment: int) -> None:
        self._mappings.pop(segment, None)


def within(block: Block, memory: memoryview) -> memoryview:
    """The bytes of `block` in those of its segment. Raises Corrupt."""
    if block.offset < 0 or block.nbytes < 0 or block.offset + block.nbytes > len(memory):
        raise Corrupt(f"block of {block.field!r} lies outside segment {block.segment:016x}")
    return memory[block.offset : block.offset + block.nbytes]


def digest(data: np.ndarray | memoryview) -> int:
    """xxh3-64 of a block's bytes."""
    return xxhash.xxh3_64_intdigest(data.data if isinstance(data, np.ndarray) else data)


def verify(block: Block, data: np.ndarray | memoryview) -> None:
    """Raise Corrupt if `data` are not the bytes that were committed as `block`."""
    found = digest(data)
    if found != block.digest:
        raise Corrupt(
            f"block of {block.field!r} at {block.offset} in segment {block.segment:016x}: digest {found:016x}, "
            f"committed was {block.digest:016x}; the stored bytes were changed"
        )


def fill(extent: Extent, field: str, column: Column) -> Block:
    """Copy `column` to its place, which is the one copy of a put: the block that names it."""
    if extent.data is not None and extent.nbytes <= SMALL:
        packed = column.packed()
        extent.data.data[:] = packed
        found = xxhash.xxh3_64_intdigest(packed)
    elif extent.data is not None and extent.nbytes <= CHUNK:
        column.write_to(extent.data)
        found = digest(extent.data)
    else:
        found = _fill_large(extent, column)
    return Block(
        field, extent.segment, extent.offset, extent.nbytes, column.rows, column.kind, column.dtype, column.shape, found
    )


def _fill_large(extent: Extent, column: Column) -> int:
    hashed, at = xxhash.xxh3_64(), 0
    for part in column.parts():
        for start in range(0, len(part), CHUNK):
            piece = part[start : start + CHUNK]
            extent.write(at, piece)
            hashed.update(piece.data)
            at += len(piece)
    return hashed.intdigest()
