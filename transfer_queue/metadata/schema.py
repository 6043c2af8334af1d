"""What is known of a field without its data: {dtype, shape, is_nested, is_non_tensor[, per_sample_shapes]}.

`shape` is that of one row, None where rows differ or are no tensors; `per_sample_shapes` says it row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from transfer_queue.storage.columns import BFLOAT16
from transfer_queue.storage.convert import is_tensor

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue.net.messages import FieldSchema

Schema = dict[str, dict[str, Any]]


class RowShapes(Sequence[tuple[int, ...]]):
    """Shapes of rows that differ in their first dimension only: two arrays instead of a list of tuples."""

    __slots__ = ("_inner", "_lengths")

    def __init__(self, lengths: np.ndarray, inner: tuple[int, ...]) -> None:
        self._lengths, self._inner = lengths, inner

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> RowShapes: ...
    def __getitem__(self, index: int | slice) -> tuple[int, ...] | RowShapes:
        if isinstance(index, slice):
            return RowShapes(self._lengths[index], self._inner)
        return (int(self._lengths[index]), *self._inner)

    def take(self, rows: np.ndarray) -> RowShapes:
        return RowShapes(self._lengths[rows], self._inner)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == [tuple(shape) for shape in other]

    def __repr__(self) -> str:
        return repr(list(self))


def extract_field_schema(data: TensorDict) -> Schema:
    """The schema of each field of a TensorDict."""
    return {str(name): _of_value(data.get(name)) for name in data.keys()}  # noqa: SIM118


def schema_of(fields: Iterable[FieldSchema]) -> Schema:
    """The schema that the controller knows; without rows' shapes, which stand with the data."""
    return {field.field: _of_stored(field) for field in fields}


def rows_of_schema(schema: Schema, rows: np.ndarray | slice) -> Schema:
    """The schema of some of the rows."""
    return {name: _rows_of_one(one, rows) for name, one in schema.items()}


def _of_value(value: Any) -> dict[str, Any]:
    if not is_tensor(value):
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    if not value.is_nested:
        return {"dtype": value.dtype, "shape": tuple(value.shape[1:]), "is_nested": False, "is_non_tensor": False}
    return {
        "dtype": value.dtype,
        "shape": None,
        "is_nested": True,
        "is_non_tensor": False,
        "per_sample_shapes": _row_shapes(value),
    }


def _row_shapes(nested: Any) -> Sequence[tuple[int, ...]]:
    import torch

    if nested.layout is torch.jagged and getattr(nested, "_ragged_idx", 1) == 1 and nested.lengths() is None:
        lengths = np.diff(nested.offsets().cpu().numpy()).astype(np.int32)
        return RowShapes(lengths, tuple(nested.values().shape[1:]))
    return [tuple(row.shape) for row in nested.unbind()]


def _of_stored(field: FieldSchema) -> dict[str, Any]:
    if field.kind == "object" or not field.dtype:
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": field.kind == "object"}
    nested = field.kind == "ragged"
    return {
        "dtype": torch_dtype(field.dtype),
        "shape": None if nested else tuple(field.shape),
        "is_nested": nested,
        "is_non_tensor": False,
    }


def torch_dtype(name: str) -> Any:
    """The torch dtype of a column's dtype."""
    import torch

    if name == BFLOAT16:
        return torch.bfloat16
    return getattr(torch, np.dtype(name).name)


def _rows_of_one(one: Mapping[str, Any], rows: np.ndarray | slice) -> dict[str, Any]:
    shapes = one.get("per_sample_shapes")
    if shapes is None:
        return dict(one)
    if isinstance(rows, slice):
        picked = shapes[rows]
    elif isinstance(shapes, RowShapes):
        picked = shapes.take(rows)
    else:
        picked = [shapes[row] for row in rows.tolist()]
    return {**one, "per_sample_shapes": picked}
