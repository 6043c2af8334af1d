"""One field of many rows, packed: the form in which rows are written, stored and read.

    dense    values[rows, *shape]                                a scalar or a fixed shape per row
    ragged   values[total, *shape], offsets[rows + 1]            row i = values[offsets[i] : offsets[i + 1]]
    object   values[total] of bytes, offsets[rows + 1]           row i = one msgpack value (storage/objects.py)

A block is a column in memory: `offsets` (int64), padded to 64 bytes, then `values`; a dense block has only values.
Whoever reads a block passes it through `read_block`, which believes nothing that the bytes say about lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from transfer_queue.errors import Corrupt, Invalid
from transfer_queue.net.messages import Block
from transfer_queue.storage.memory import LEAST, Empty, scratch
from transfer_queue.storage.objects import MAX_PARTS, decode_object, decode_objects, encode_objects

ALIGN = 64
"""Blocks and the values in them start at multiples of a cache line."""

BFLOAT16 = "bfloat16"
"""numpy has no bfloat16: such values lie in a uint16 array, and the column's dtype says what they mean."""

DTYPES = frozenset(
    ["|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16", BFLOAT16]
)

_NAMES = {dtype: dtype.str for dtype in map(np.dtype, sorted(DTYPES - {BFLOAT16}))}
"""Of dtypes that are stored as they are: the wire's name."""

LONG_ROW_BYTES = 1024
"""Rows longer than this on average are gathered slice by slice; shorter ones by one vectorised index."""

Kind = Literal["dense", "ragged", "object"]


class Column(msgspec.Struct, frozen=True, eq=False):
    """`rows` values of one field. `col[i]` is a numpy view (dense, ragged) or a fresh Python object (object).

    `shape` is the shape of a row (dense) or of one element of a row's first dimension (ragged). A Struct, which is made
    in an eighth of the time of a dataclass: there is one for each block of each put.
    """

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    values: np.ndarray
    offsets: np.ndarray | None
    rows: int

    @staticmethod
    def dense(array: np.ndarray | Sequence[Any], *, dtype: str | None = None) -> Column:
        """A column whose row i is `array[i]`."""
        values, name = _checked_values(np.asarray(array), dtype)
        if values.ndim == 0:
            raise Invalid("a dense column needs an array with a first dimension of rows, got a scalar")
        return Column("dense", name, values.shape[1:], values, None, len(values))

    @staticmethod
    def ragged(rows: Sequence[np.ndarray | Sequence[Any]], *, dtype: str | None = None) -> Column:
        """A column of rows that differ in their first dimension only."""
        arrays = [np.asarray(row) for row in rows]
        if len(arrays) == 1 and arrays[0].ndim:  # most puts are of one row
            values, name = _checked_values(arrays[0], dtype)
            return Column("ragged", name, values.shape[1:], values, _offsets([len(values)]), 1)
        if not arrays:
            raise Invalid("a ragged column needs at least one row; use Column.from_packed for none")
        first = arrays[0]
        for i, array in enumerate(arrays):
            if array.ndim == 0 or array.shape[1:] != first.shape[1:] or array.dtype != first.dtype:
                raise Invalid(
                    f"row {i} has dtype {array.dtype} and shape {array.shape}; the rows of a ragged column share dtype "
                    f"({first.dtype}) and all dimensions but the first ({first.shape})"
                )
        offsets = _offsets([len(a) for a in arrays])
        values = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return Column.from_packed(values, offsets, dtype=dtype)

    @staticmethod
    def objects(rows: Sequence[Any], *, field: str = "value", parts: int = MAX_PARTS) -> Column:
        """A column of Python objects. Raises TypeError naming field and row for a type that cannot come back, and Large
        as encode_objects does."""
        encoded = encode_objects(rows, field=field, parts=parts)
        lengths = list(map(len, encoded))
        offsets, total = _offsets(lengths), sum(lengths)
        if total < LEAST:
            values = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        else:
            values = scratch.empty(total, np.uint8)
            copy_slices(encoded, values)
        return Column("object", "|u1", (), values, offsets, len(encoded))

    @staticmethod
    def from_packed(values: np.ndarray, offsets: np.ndarray, *, dtype: str | None = None) -> Column:
        """A ragged column from values that already lie end to end. Raises Invalid when the offsets do not fit them."""
        values, name = _checked_values(values, dtype)
        offsets = np.ascontiguousarray(offsets, dtype=np.int64)
        if values.ndim == 0 or not _offsets_fit(offsets, len(values)):
            raise Invalid(f"offsets do not cut an array of shape {values.shape} into rows")
        values = values[: offsets[-1]]
        return Column("ragged", name, values.shape[1:], values, offsets, len(offsets) - 1)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        if not -self.rows <= index < self.rows:
            raise IndexError(f"row {index} of a column of {self.rows} rows")
        index %= self.rows
        if self.offsets is None:
            return self.values[index]
        part = self.values[self.offsets[index] : self.offsets[index + 1]]
        return decode_object(part) if self.kind == "object" else part

    def rows_list(self) -> list[Any]:
        """All rows: numpy views, or Python objects."""
        if self.kind == "object":
            assert self.offsets is not None
            return decode_objects(self.values, self.offsets)
        if self.offsets is None:
            return list(self.values)
        return [self.values[a:b] for a, b in pairwise(self.offsets.tolist())]

    def lengths(self) -> np.ndarray:
        """Length of each row of a ragged or object column, in elements or bytes."""
        if self.offsets is None:
            raise Invalid("a dense column has no row lengths; see `shape`")
        return np.diff(self.offsets)

    def take(self, index: np.ndarray | Sequence[int], *, empty: Empty = np.empty) -> Column:
        """The rows at `index`, in that order, copied to memory from `empty`. Raises IndexError for what is no row."""
        index = np.asarray(index, dtype=np.int64)
        if len(index) == 1 and 0 <= (row := int(index[0])) < self.rows:
            part = self.view(row, row + 1)
            return replace(part, values=copied(part.values, empty))
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= self.rows):
            raise IndexError(f"rows {int(index.min())}..{int(index.max())} of a column of {self.rows} rows")
        if len(index) and index[-1] - index[0] == len(index) - 1 and (index[1:] - index[:-1] == 1).all():
            part = self.view(int(index[0]), int(index[-1]) + 1)
            return replace(part, values=copied(part.values, empty))
        if self.offsets is None:
            values = empty((len(index), *self.shape), self.values.dtype)
            np.take(self.values, index, axis=0, out=values, mode="clip")
            return Column(self.kind, self.dtype, self.shape, values, None, len(index))
        starts, lengths = self.offsets[index], self.offsets[index + 1] - self.offsets[index]
        offsets = np.zeros(len(index) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        values = _gather(self.values, starts, lengths, int(offsets[-1]), empty)
        return Column(self.kind, self.dtype, self.shape, values, offsets, len(index))

    def view(self, start: int, end: int) -> Column:
        """Consecutive rows, not copied."""
        if self.offsets is None:
            return Column(self.kind, self.dtype, self.shape, self.values[start:end], None, end - start)
        first, last = int(self.offsets[start]), int(self.offsets[end])
        offsets = self.offsets[start : end + 1] - first
        return Column(self.kind, self.dtype, self.shape, self.values[first:last], offsets, end - start)

    @staticmethod
    def concat(columns: Sequence[Column], *, empty: Empty = np.empty) -> Column:
        """The rows of all columns, in order, copied. Raises Invalid if kind, dtype or shape differ."""
        if not columns:
            raise Invalid("cannot concatenate no columns")
        first = columns[0]
        for column in columns:
            if (column.kind, column.dtype, column.shape) != (first.kind, first.dtype, first.shape):
                raise Invalid(f"columns differ: {first.describe()} and {column.describe()}")
        rows = sum(c.rows for c in columns)
        values = empty((sum(len(c.values) for c in columns), *first.values.shape[1:]), first.values.dtype)
        np.concatenate([c.values for c in columns], out=values)
        if first.offsets is None:
            return Column(first.kind, first.dtype, first.shape, values, None, rows)
        offsets = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(np.concatenate([c.lengths() for c in columns]), out=offsets[1:])
        return Column(first.kind, first.dtype, first.shape, values, offsets, rows)

    def describe(self) -> str:
        return f"{self.kind} {self.dtype}{list(self.shape)} of {self.rows} rows"

    @property
    def nbytes(self) -> int:
        """Size of this column as a block."""
        return self._values_at() + self.values.nbytes

    def packed(self) -> bytes:
        """The block, for columns of few bytes: several times quicker than laying it out in an array."""
        values = self.values.tobytes()
        if self.offsets is None:
            return values
        head = self.offsets.tobytes()
        return b"".join((head, bytes(self._values_at() - len(head)), values))

    def write_to(self, target: np.ndarray) -> None:
        """Lay the column out in `target`, a uint8 array of exactly `nbytes`."""
        at = self._values_at()
        if self.offsets is not None:
            head = 8 * (self.rows + 1)
            target[:head].view(np.int64)[:] = self.offsets
            target[head:at] = 0
        if self.values.nbytes:
            target[at:].view(self.values.dtype).reshape(self.values.shape)[...] = self.values

    def parts(self) -> list[np.ndarray]:
        """The block as uint8 arrays to be laid end to end."""
        parts = []
        if self.offsets is not None:
            head = self.offsets.view(np.uint8)
            parts = [head, np.zeros(self._values_at() - len(head), np.uint8)]
        if self.values.nbytes:
            parts.append(bytes_of(np.ascontiguousarray(self.values)))
        return parts

    def _values_at(self) -> int:
        return 0 if self.offsets is None else aligned(8 * (self.rows + 1))


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of blocks."""
    return -(-nbytes // ALIGN) * ALIGN


def storage_dtype(name: str) -> np.dtype:
    """The numpy dtype in which values of the wire dtype `name` lie. Raises Invalid for a dtype not in DTYPES."""
    if name not in DTYPES:
        raise Invalid(f"dtype {name!r} is not storable; known are {', '.join(sorted(DTYPES))}")
    return np.dtype("<u2") if name == BFLOAT16 else np.dtype(name)


def read_block(block: Block, memory: np.ndarray | memoryview) -> Column:
    """The column in `memory`, the block's own bytes, as views of it. Raises Corrupt if they contradict `block`.

    Offsets are copied before they are checked, so that a writer of the same memory cannot change them afterwards.
    """
    data, dtype = np.frombuffer(memory, np.uint8), storage_dtype(block.dtype)
    if len(data) != block.nbytes or block.rows < 0 or any(n < 0 for n in block.shape):
        raise Corrupt(f"block of {block.field!r}: {len(data)} bytes where the ledger says {block.nbytes}")
    item = dtype.itemsize * math.prod(block.shape)
    if block.kind == "dense":
        if block.rows * item != block.nbytes:
            raise Corrupt(f"block of {block.field!r}: {block.rows} rows of {item} bytes are not {block.nbytes} bytes")
        values = data.view(dtype).reshape(block.rows, *block.shape) if item else _empty(dtype, block.rows, block.shape)
        return Column("dense", block.dtype, block.shape, values, None, block.rows)
    at = aligned(8 * (block.rows + 1))
    if at > block.nbytes:
        raise Corrupt(f"block of {block.field!r}: {block.nbytes} bytes cannot hold the offsets of {block.rows} rows")
    offsets = data[: 8 * (block.rows + 1)].view(np.int64).copy()
    count = (block.nbytes - at) // item if item else int(offsets[-1])
    if not _offsets_fit(offsets, count) or (item and count * item != block.nbytes - at):
        raise Corrupt(f"block of {block.field!r}: its offsets point outside its {count} elements")
    values = data[at:].view(dtype).reshape(count, *block.shape) if item else _empty(dtype, count, block.shape)
    return Column(block.kind, block.dtype, block.shape, values, offsets, block.rows)


def _empty(dtype: np.dtype, rows: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.empty((rows, *shape), dtype)


def _checked_values(values: np.ndarray, dtype: str | None) -> tuple[np.ndarray, str]:
    """Little-endian contiguous values and their wire dtype."""
    if dtype is None and (known := _NAMES.get(values.dtype)) is not None:
        return np.ascontiguousarray(values) if values.ndim else values, known
    name = dtype or values.dtype.newbyteorder("<").str
    if values.dtype != storage_dtype(name):
        values = values.astype(storage_dtype(name))
    return np.ascontiguousarray(values) if values.ndim else values, name


def _offsets(lengths: list[int]) -> np.ndarray:
    """Where rows of these lengths begin, and the last one ends."""
    if len(lengths) == 1:  # most puts are of one row
        return np.array([0, lengths[0]], dtype=np.int64)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _offsets_fit(offsets: np.ndarray, count: int) -> bool:
    if offsets.ndim != 1 or len(offsets) == 0:
        return False
    if len(offsets) == 2:  # one row: by far the most frequent block, and numpy's reductions cost microseconds
        first, last = offsets.tolist()
        return first == 0 and 0 <= last <= count
    return bool(offsets[0] == 0 and offsets[-1] <= count and (offsets[1:] >= offsets[:-1]).all())


def bytes_of(values: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array."""
    return values.reshape(-1).view(np.uint8)


def copy_slices(slices: Iterable[memoryview | bytes], out: np.ndarray) -> None:
    """Lay bytes end to end in `out`. Slices of memoryviews cost half of what those of arrays do."""
    target, at = bytes_of(out).data, 0
    for part in slices:
        end = at + len(part)
        target[at:end] = part
        at = end


def elements(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The indexes start, start + 1, ... of each piece, end to end."""
    ends = np.cumsum(lengths)
    index = np.arange(int(ends[-1]) if len(ends) else 0)
    index += np.repeat(starts - (ends - lengths), lengths)
    return index


def copied(values: np.ndarray, empty: Empty) -> np.ndarray:
    """The same values in memory from `empty`."""
    out = empty(values.shape, values.dtype)
    np.copyto(out, values)
    return out


def _gather(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray, total: int, empty: Empty) -> np.ndarray:
    """The pieces values[start : start + length], end to end."""
    out = empty((total, *values.shape[1:]), values.dtype)
    if len(starts) == 1 or out.nbytes > LONG_ROW_BYTES * len(starts):
        item, source = out.dtype.itemsize * math.prod(out.shape[1:]), bytes_of(values).data
        cuts = zip((item * starts).tolist(), (item * (starts + lengths)).tolist(), strict=True)
        copy_slices((source[start:end] for start, end in cuts), out)
        return out
    if out.nbytes:  # else its elements are none, however many a block claims
        np.take(values, elements(starts, lengths), axis=0, out=out, mode="clip")  # "raise" would copy once more
    return out
