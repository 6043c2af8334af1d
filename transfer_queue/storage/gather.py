"""Rows asked in some order, scattered over blocks, as one column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from transfer_queue.errors import Corrupt, Invalid
from transfer_queue.net.messages import Block, Located
from transfer_queue.storage.columns import Column, aligned, joined, storage_dtype
from transfer_queue.storage.memory import Empty

FEW_ROWS_PER_BLOCK = 4
"""Up to this many rows per block on average, rows are joined one by one; above, block by block."""


def places(located: Located) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Per field the block number and the row in it, for each key. Raises Corrupt if they are outside their bounds."""
    found = {}
    rows = np.array([block.rows for block in located.blocks], dtype=np.int32)
    for place in located.places:
        block, row = np.frombuffer(place.block, "<i4"), np.frombuffer(place.index, "<i4")
        if len(block) != len(located.keys) or len(row) != len(block):
            raise Corrupt(f"the controller placed {len(block)} rows of {place.field!r} for {len(located.keys)} keys")
        if len(block) and (block.min() < 0 or block.max() >= len(rows) or row.min() < 0 or (row >= rows[block]).any()):
            raise Corrupt(f"the controller placed rows of {place.field!r} outside their blocks")
        found[place.field] = (block, row)
    return found


def run_of(block: np.ndarray, row: np.ndarray) -> tuple[int, int, int] | None:
    """(block, first row, row after the last) if the rows asked lie one after another in one block."""
    if not len(block) or not (block == block[0]).all() or not (np.diff(row) == 1).all():
        return None
    return int(block[0]), int(row[0]), int(row[-1]) + 1


def gather(
    field: str, block: np.ndarray, row: np.ndarray, columns: Mapping[int, Column], *, empty: Empty = np.empty
) -> Column:
    """A copy of row `row[i]` of column `columns[block[i]]` for each i, in memory from `empty`.

    Columns of one field that were put in different forms are brought together: fixed rows become ragged where that
    says the same, and what still differs becomes an object column of arrays.
    """
    if len(block) == 1:
        return columns[int(block[0])].take(row, empty=empty)
    used, inverse = np.unique(block, return_inverse=True)
    parts = _alike(field, [columns[b] for b in used.tolist()])
    if len(parts) == 1:
        return parts[0].take(row, empty=empty)
    if len(block) <= FEW_ROWS_PER_BLOCK * len(parts):
        return _join_rows(parts, inverse, row, empty)
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(len(parts) + 1))
    taken = [part.take(row[order[a:b]], empty=empty) for part, a, b in zip(parts, starts[:-1], starts[1:], strict=True)]
    result = Column.concat(taken, empty=empty)
    if (order[1:] > order[:-1]).all():
        return result
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return result.take(back, empty=empty)


def join_single(blocks: Sequence[Block], data: Sequence[memoryview], empty: Empty) -> Column | None:
    """Blocks of one row each, as a column: what many small puts leave, so nothing here costs microseconds a row.

    None if the blocks are of different forms, or their bytes are not what such a block should have.
    """
    first = blocks[0]
    form = first.kind, first.dtype, first.shape
    dtype = storage_dtype(first.dtype)
    item = dtype.itemsize * math.prod(first.shape)
    if item <= 0 or any(block.rows != 1 or (block.kind, block.dtype, block.shape) != form for block in blocks):
        return None
    head = 0 if first.kind == "dense" else aligned(2 * 8)
    sizes = np.array([len(part) for part in data], np.int64) - head
    lengths, rest = np.divmod(sizes, item)
    if sizes.min() < 0 or rest.any():
        return None
    if head:
        cuts = np.frombuffer(b"".join([part[:16] for part in data]), np.int64).reshape(-1, 2)
        if cuts[:, 0].any() or (cuts[:, 1] != lengths).any():
            return None
    elif (lengths != 1).any():
        return None
    ends = np.cumsum(sizes)
    values = empty((int(ends[-1]),), np.uint8)
    target, start = values.data, 0
    for part, end in zip(data, ends.tolist(), strict=True):
        target[start:end] = part[head:]
        start = end
    offsets = np.concatenate([[0], np.cumsum(lengths)]) if head else None
    values = values.view(dtype).reshape(-1, *first.shape)
    return Column(first.kind, first.dtype, first.shape, values, offsets, len(blocks))


def _join_rows(parts: list[Column], part: np.ndarray, row: np.ndarray, empty: Empty) -> Column:
    first = parts[0]
    pairs = list(zip(part.tolist(), row.tolist(), strict=True))
    if first.offsets is None:
        values = joined([parts[p].values[r : r + 1] for p, r in pairs], empty)
        return Column(first.kind, first.dtype, first.shape, values, None, len(pairs))
    pieces = []
    offsets = np.zeros(len(pairs) + 1, np.int64)
    total = 0
    for i, (p, r) in enumerate(pairs):
        cut = parts[p].offsets
        assert cut is not None
        piece = parts[p].values[cut[r] : cut[r + 1]]
        pieces.append(piece)
        total += len(piece)
        offsets[i + 1] = total
    return Column(first.kind, first.dtype, first.shape, joined(pieces, empty), offsets, len(pairs))


def _alike(field: str, parts: list[Column]) -> list[Column]:
    """The same columns, of one kind, dtype and shape."""
    if len({(c.kind, c.dtype, c.shape) for c in parts}) == 1:
        return parts
    raggeds = [_as_ragged(c) for c in parts]
    if len({(c.kind, c.dtype, c.shape) for c in raggeds}) == 1:
        return raggeds
    if any(c.dtype == "bfloat16" for c in parts):
        raise Invalid(
            f"field {field!r} was put as {' and '.join(sorted({c.describe() for c in parts}))}; read them apart"
        )
    return [c if c.kind == "object" else Column.objects(c.rows_list(), field=field) for c in parts]


def _as_ragged(column: Column) -> Column:
    """A dense column of rows with at least one dimension, as a ragged one."""
    if column.kind != "dense" or not column.shape:
        return column
    offsets = np.arange(column.rows + 1, dtype=np.int64) * column.shape[0]
    return Column.from_packed(column.values.reshape(-1, *column.shape[1:]), offsets, dtype=column.dtype)
