"""Rows asked in some order, scattered over blocks, as one column."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from transfer_queue.errors import Corrupt, Invalid
from transfer_queue.net.messages import Block, FieldPlace, Located
from transfer_queue.storage.columns import (
    BFLOAT16,
    LONG_ROW_BYTES,
    Column,
    aligned,
    bytes_of,
    copy_slices,
    elements,
    storage_dtype,
)
from transfer_queue.storage.memory import Empty

FEW_ROWS_PER_BLOCK = 4
"""Up to this many rows per block on average, rows are copied one by one; above, and if they are short, by vectorised
indexes block by block."""


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


def place_of_one(place: FieldPlace, blocks: Sequence[Block]) -> tuple[int, int]:
    """The same of a field, where there is one key."""
    if len(place.block) != 4 or len(place.index) != 4:
        raise Corrupt(f"the controller placed {len(place.block) // 4} rows of {place.field!r} for 1 key")
    number, row = int.from_bytes(place.block, "little", signed=True), int.from_bytes(place.index, "little", signed=True)
    if not (0 <= number < len(blocks) and 0 <= row < blocks[number].rows):
        raise Corrupt(f"the controller placed rows of {place.field!r} outside their blocks")
    return number, row


def run_of(block: np.ndarray, row: np.ndarray) -> tuple[int, int, int] | None:
    """(block, first row, row after the last) if the rows asked lie one after another in one block."""
    if not len(block) or not (block == block[0]).all() or not (np.diff(row) == 1).all():
        return None
    return int(block[0]), int(row[0]), int(row[-1]) + 1


RowsOf = Callable[[Column], list[Any]]
"""The rows of a column of numbers as objects, where columns of one field differ."""


def arrays_of(column: Column) -> list[Any]:
    """The rows as numpy arrays. Raises Invalid for bfloat16, which numpy does not have."""
    if column.dtype == BFLOAT16:
        raise Invalid(f"{column.describe()} beside others of another dtype or shape: numpy has no bfloat16")
    return column.rows_list()


def gather(
    field: str, block: np.ndarray, row: np.ndarray, columns: Mapping[int, Column], *, empty: Empty = np.empty,
    mixed: RowsOf = arrays_of,
) -> Column:  # fmt: skip
    """A copy of row `row[i]` of column `columns[block[i]]` for each i, in memory from `empty`.

    Columns of one field that were put in different forms are brought together: fixed rows become ragged where that
    says the same, and what still differs becomes an object column, of what `mixed` makes of a column's rows.
    """
    if len(block) == 1:
        return columns[int(block[0])].take(row, empty=empty)
    used, inverse = np.unique(block, return_inverse=True)
    parts = _alike(field, [columns[b] for b in used.tolist()], mixed)
    return parts[0].take(row, empty=empty) if len(parts) == 1 else _from_parts(parts, inverse, row, empty)


def _from_parts(parts: list[Column], part: np.ndarray, row: np.ndarray, empty: Empty) -> Column:
    """Row `row[i]` of column `parts[part[i]]` for each i: every row is copied once, to its place."""
    first, starts, lengths = parts[0], row.astype(np.int64), np.ones(len(row), np.int64)
    if first.offsets is not None:
        cuts = np.concatenate([column.offsets for column in parts if column.offsets is not None])
        at = np.cumsum([0, *(column.rows + 1 for column in parts[:-1])])[part] + row
        starts, lengths = cuts[at], cuts[at + 1] - cuts[at]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    out = empty((int(offsets[-1]), *first.values.shape[1:]), first.values.dtype)
    if out.nbytes > LONG_ROW_BYTES * len(row) or len(row) <= FEW_ROWS_PER_BLOCK * len(parts):
        item = out.dtype.itemsize * math.prod(out.shape[1:])
        sources = [bytes_of(column.values).data for column in parts]
        places = zip(part.tolist(), (item * starts).tolist(), (item * (starts + lengths)).tolist(), strict=True)
        copy_slices((sources[p][start:end] for p, start, end in places), out)
    elif out.nbytes:
        order = np.argsort(part, kind="stable")
        bounds = np.searchsorted(part[order], np.arange(len(parts) + 1)).tolist()
        for column, (a, b) in zip(parts, pairwise(bounds), strict=True):
            mine = order[a:b]
            source, target = elements(starts[mine], lengths[mine]), elements(offsets[mine], lengths[mine])
            out[target] = column.values[source]
    return Column(first.kind, first.dtype, first.shape, out, None if first.offsets is None else offsets, len(row))


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
    values = empty((int(sizes.sum()),), np.uint8)
    copy_slices((part[head:] for part in data), values)
    offsets = np.concatenate([[0], np.cumsum(lengths)]) if head else None
    values = values.view(dtype).reshape(-1, *first.shape)
    return Column(first.kind, first.dtype, first.shape, values, offsets, len(blocks))


def _alike(field: str, parts: list[Column], mixed: RowsOf) -> list[Column]:
    """The same columns, of one kind, dtype and shape."""
    if len({(c.kind, c.dtype, c.shape) for c in parts}) == 1:
        return parts
    raggeds = [_as_ragged(c) for c in parts]
    if len({(c.kind, c.dtype, c.shape) for c in raggeds}) == 1:
        return raggeds
    try:
        return [c if c.kind == "object" else Column.objects(mixed(c), field=field) for c in parts]
    except Invalid as error:
        forms = " and ".join(sorted({c.describe() for c in parts}))
        raise Invalid(f"field {field!r} was put as {forms}; read them apart, or by kv_batch_get: {error}") from None


def _as_ragged(column: Column) -> Column:
    """A dense column of rows with at least one dimension, as a ragged one."""
    if column.kind != "dense" or not column.shape:
        return column
    offsets = np.arange(column.rows + 1, dtype=np.int64) * column.shape[0]
    return Column.from_packed(column.values.reshape(-1, *column.shape[1:]), offsets, dtype=column.dtype)
