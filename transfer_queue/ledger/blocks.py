"""Which blocks hold live rows, and what that keeps alive in each segment."""

from __future__ import annotations

from dataclasses import dataclass, field

from transfer_queue.net.messages import Block

BlockId = tuple[str, int]
"""Partition and number."""


@dataclass(slots=True)
class SegmentUse:
    """What lives in one segment. `end` is the highest byte that a block in it ever reached."""

    nbytes: int = 0
    end: int = 0
    blocks: set[BlockId] = field(default_factory=set)


class Segments:
    """Live bytes by segment, over all partitions.

    Invariant: `use[s].nbytes` is the sum of `nbytes` over the live blocks in s; a segment without any is not listed.
    """

    def __init__(self) -> None:
        self.use: dict[int, SegmentUse] = {}
        self._emptied: set[int] = set()

    def add(self, number: BlockId, block: Block) -> None:
        use = self.use.setdefault(block.segment, SegmentUse())
        use.blocks.add(number)
        use.nbytes += block.nbytes
        use.end = max(use.end, block.offset + block.nbytes)

    def remove(self, number: BlockId, block: Block) -> None:
        use = self.use[block.segment]
        use.blocks.remove(number)
        use.nbytes -= block.nbytes
        if not use.blocks:
            del self.use[block.segment]
            self._emptied.add(block.segment)

    def take_emptied(self) -> set[int]:
        """Segments whose last live block died since the last call."""
        emptied, self._emptied = self._emptied, set()
        return {segment for segment in emptied if segment not in self.use}


class BlockTable:
    """The live blocks of one partition, by number.

    Invariants: a block is live as long as a field of a row lies in it; `rows[b]` counts those rows; `nbytes` is the sum
    over all live blocks. Numbers are reused.
    """

    def __init__(self, partition: str, segments: Segments) -> None:
        self.blocks: list[Block | None] = []
        self.rows: list[int] = []
        self.nbytes = 0
        self._free: list[int] = []
        self._partition = partition
        self._segments = segments

    def rename(self, partition: str) -> None:
        for use in self._segments.use.values():
            mine = {(partition, number) for name, number in use.blocks if name == self._partition}
            use.blocks = {block for block in use.blocks if block[0] != self._partition} | mine
        self._partition = partition

    def __getitem__(self, number: int) -> Block:
        block = self.blocks[number]
        assert block is not None
        return block

    def add(self, block: Block, rows: int) -> int:
        """Store a block in which `rows` (at least 1) rows live; its number."""
        if self._free:
            number = self._free.pop()
            self.blocks[number], self.rows[number] = block, rows
        else:
            number = len(self.blocks)
            self.blocks.append(block)
            self.rows.append(rows)
        self.nbytes += block.nbytes
        self._segments.add((self._partition, number), block)
        return number

    def release(self, number: int, rows: int) -> None:
        """`rows` rows fewer live in a block; it dies with the last."""
        self.rows[number] -= rows
        if self.rows[number]:
            return
        block = self[number]
        self.nbytes -= block.nbytes
        self._segments.remove((self._partition, number), block)
        self.blocks[number] = None
        self._free.append(number)

    def in_segments(self, segments: set[int]) -> list[int]:
        """The numbers of this partition's blocks that lie in any of `segments`."""
        uses = (self._segments.use.get(segment) for segment in segments)
        return sorted(n for use in uses if use for partition, n in use.blocks if partition == self._partition)
