"""The blocks of a put as packed numbers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from sys import intern

from transfer_queue.net.messages import Block


class Layout:
    """What the blocks of a put have in common with those of many other puts; the rest are numbers, packed.

    The numbers of a put: rows, then per block segment, offset, nbytes, digest and its shape.
    """

    def __init__(self, number: int, kinds: Sequence[tuple[str, str, str, int]], mask: int) -> None:
        """`kinds`: per block field, kind, dtype, dimensions of its shape."""
        self.number = number
        self.mask = mask
        self.kinds = [(intern(name), intern(kind), intern(dtype), dims) for name, kind, dtype, dims in kinds]
        self.starts = [1]
        for *_, dims in self.kinds:
            self.starts.append(self.starts[-1] + 4 + dims)
        self._places = {kind[0]: (at, *kind) for at, kind in zip(self.starts, self.kinds, strict=False)}
        self._struct = struct.Struct(f"<{self.starts[-1]}Q")

    def pack(self, blocks: Sequence[Block]) -> bytes:
        numbers = [blocks[0].rows]
        for b in blocks:
            numbers += (b.segment, b.offset, b.nbytes, b.digest, *b.shape)
        return self._struct.pack(*numbers)

    def blocks(self, data: bytes, fields: Sequence[str] | None = None) -> list[Block]:
        """The blocks of these fields, in this order; by default of all."""
        n = self._struct.unpack(data)
        places = self._places.values() if fields is None else [self._places[field] for field in fields]
        return [
            Block(name, n[at], n[at + 1], n[at + 2], n[0], kind, dtype, n[at + 4 : at + 4 + dims], n[at + 3])  # pyright: ignore[reportArgumentType]
            for at, name, kind, dtype, dims in places
        ]

    def extents(self, data: bytes) -> tuple[int, list[tuple[int, int, int]]]:
        """How many rows were put, and segment, offset and nbytes of each block."""
        numbers = self._struct.unpack(data)
        return numbers[0], [numbers[at : at + 3] for at in self.starts[:-1]]
