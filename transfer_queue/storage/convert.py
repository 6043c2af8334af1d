"""What a caller may put, turned into columns. torch is recognised by duck typing and never imported here."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transfer_queue.errors import Invalid
from transfer_queue.storage.columns import BFLOAT16, Column
from transfer_queue.storage.objects import MAX_PARTS, Large
from transfer_queue.storage.tensors import why_not_storable

_OBJECT_STACKS = frozenset({"NonTensorStack", "NonTensorData", "LinkedList"})

_NO_ARRAYS = frozenset({dict, list, str, int, float, bool, type(None)})

PARTS_AT_ONCE = 1 << 16
"""Parts of objects that are packed on the event loop: a few ms if they are plain, some tens if they hold tuples."""


async def packed(columns: Mapping[str, Any], rows: int) -> dict[str, Column]:
    """As `as_columns` does; objects of many parts are packed in a thread, so that the event loop goes on."""
    try:
        return as_columns(columns, rows, parts=PARTS_AT_ONCE)
    except Large:
        return await asyncio.to_thread(as_columns, columns, rows)


def as_columns(columns: Mapping[str, Any], rows: int, *, parts: int = MAX_PARTS) -> dict[str, Column]:
    """One column per field. Raises Invalid naming the field whose length is not `rows` or whose dtype is unknown;
    TypeError, and Large, as Column.objects does."""
    result = {}
    for field, values in columns.items():
        if not isinstance(field, str):
            raise Invalid(f"a field is named {field!r}; names are strings")
        column = as_column(field, values, parts)
        if column.rows != rows:
            raise Invalid(f"field {field!r} has {column.rows} rows for {rows} keys")
        result[field] = column
    return result


def as_column(field: str, values: Any, parts: int = MAX_PARTS) -> Column:
    """A Column, numpy array, list of arrays (ragged), list of other objects, or torch tensor as a column."""
    if isinstance(values, Column):
        return values
    try:
        if type(values) is list:  # what most are
            return _from_list(field, values, parts)
        if isinstance(values, np.ndarray):
            return _from_array(field, values, parts)
        if is_tensor(values):
            return _from_tensor(field, values, parts)
        if type(values).__name__ in _OBJECT_STACKS and hasattr(values, "tolist"):
            return Column.objects(values.tolist(), field=field, parts=parts)
        if isinstance(values, (list, tuple)):
            return _from_list(field, values, parts)
    except Invalid as error:
        raise Invalid(f"field {field!r}: {error}") from None
    except MemoryError:
        nbytes = getattr(values, "nbytes", None)
        size = "" if nbytes is None else f" ({nbytes} bytes)"
        raise Invalid(
            f"field {field!r}{size} does not fit into the memory of this process; put fewer rows at a time"
        ) from None
    raise Invalid(
        f"field {field!r} is a {type(values).__qualname__}; give a Column, a numpy array, a list with one entry per "
        "row, or a torch tensor"
    )


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor (nested ones included), told without importing torch."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # None, too, while another thread imports torch
    return tensor is not None and isinstance(value, tensor)


def _from_array(field: str, array: np.ndarray, parts: int) -> Column:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"field {field!r} is a masked array, whose mask would be lost: put `.filled()` and the mask")
    if array.dtype.kind == "V":
        raise TypeError(f"field {field!r} has numpy dtype {array.dtype}; put one field for each of its members")
    if array.dtype.kind in "OUS":
        if array.ndim == 0:
            raise Invalid("an array needs a first dimension of rows, got a scalar")
        return Column.objects(array.tolist(), field=field, parts=parts)
    return Column.dense(array)


def _from_list(field: str, rows: Sequence[Any], parts: int) -> Column:
    if rows and type(rows[0]) in _NO_ARRAYS:
        return Column.objects(rows, field=field, parts=parts)
    if len(rows) == 1 and type(rows[0]) is np.ndarray and rows[0].ndim and rows[0].dtype.kind in "biufc":
        return Column.ragged(rows)  # most puts are of one row
    if rows and all(type(row) is np.ndarray and row.ndim and row.dtype.kind in "biufc" for row in rows):
        first = rows[0]
        if all(row.dtype == first.dtype and row.shape[1:] == first.shape[1:] for row in rows):
            return Column.ragged(rows)
    if rows and all(
        is_tensor(row) and not row.is_nested and row.layout is sys.modules["torch"].strided for row in rows
    ):
        return _from_tensor_rows(field, rows, parts)
    return Column.objects(rows, field=field, parts=parts)


def _from_tensor(field: str, tensor: Any, parts: int) -> Column:
    torch = sys.modules["torch"]
    if not tensor.is_nested:
        values, dtype = _values(f"field {field!r}", tensor)
        return Column.dense(values, dtype=dtype)
    if tensor.layout is torch.jagged and getattr(tensor, "_ragged_idx", 1) == 1 and tensor.lengths() is None:
        values, dtype = _values(f"field {field!r}", tensor.values())
        return Column.from_packed(values, tensor.offsets().cpu().numpy(), dtype=dtype)
    return _from_tensor_rows(field, tensor.unbind(), parts)


def _from_tensor_rows(field: str, rows: Sequence[Any], parts: int) -> Column:
    first = rows[0]
    if any(row.dtype != first.dtype or row.shape[1:] != first.shape[1:] or row.ndim != first.ndim for row in rows):
        return Column.objects(list(rows), field=field, parts=parts)
    try:
        pairs = [tensor_values(row) for row in rows]
    except (TypeError, RuntimeError):
        pairs = [_values(f"field {field!r} row {i}", row) for i, row in enumerate(rows)]
    dtype = pairs[0][1]
    if first.ndim == 0:
        return Column.dense(np.stack([values for values, _ in pairs]), dtype=dtype)
    return Column.ragged([values for values, _ in pairs], dtype=dtype)


def _values(what: str, tensor: Any) -> tuple[np.ndarray, str | None]:
    """`tensor_values`. Raises TypeError saying of `what` why it cannot be stored, and what to put instead."""
    try:
        return tensor_values(tensor)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{what} {why_not_storable(tensor) or error}") from None


def tensor_values(tensor: Any) -> tuple[np.ndarray, str | None]:
    """A strided tensor as a numpy array (bfloat16 as its bits) and the wire dtype where numpy has no name for it.
    Raises what torch raises for a tensor of another kind: TypeError or RuntimeError."""
    torch = sys.modules["torch"]
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16), BFLOAT16
    return tensor.numpy(), None
