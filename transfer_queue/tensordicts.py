"""TensorDicts of the kv verbs, to columns and back. The only room that imports torch and tensordict, and only in
functions that make tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from transfer_queue.storage.columns import BFLOAT16, Column
from transfer_queue.storage.convert import as_column, is_tensor

if TYPE_CHECKING:
    from tensordict import TensorDict


def columns_of(fields: Mapping[str, Any] | TensorDict | None) -> dict[str, Column]:
    """The fields of a TensorDict, or of a dict of what QueueClient.put takes, as columns."""
    if fields is None:
        return {}
    if _is_tensordict(fields):
        return {str(name): as_column(str(name), fields.get(str(name))) for name in fields.keys()}  # noqa: SIM118
    return {name: as_column(name, values) for name, values in fields.items()}


def columns_of_one(fields: Mapping[str, Any] | TensorDict | None) -> dict[str, Column]:
    """The fields of one row: a TensorDict of batch size 1, or a dict of values, each of which becomes a row.

    Raises ValueError for another batch size, or for a nested tensor (which is many rows).
    """
    if fields is None:
        return {}
    if _is_tensordict(fields):
        if tuple(fields.batch_size) != (1,):
            raise ValueError(f"one key needs a TensorDict of batch size [1], got {list(fields.batch_size)}")
        return columns_of(fields)
    return {name: _one(name, value) for name, value in fields.items()}


def batch_size(fields: Mapping[str, Any] | TensorDict | None) -> int | None:
    """Rows of a TensorDict; None if `fields` does not say."""
    return fields.batch_size[0] if fields is not None and _is_tensordict(fields) else None


def tensordict_of(columns: Mapping[str, Column], rows: int) -> TensorDict:
    """Columns as a TensorDict that owns its memory: one number per row is a dense tensor, other tensor columns are
    jagged (also if all rows are equally long), objects are a NonTensorStack."""
    from tensordict import TensorDict

    return TensorDict({name: _value(column) for name, column in columns.items()}, batch_size=[rows])  # pyright: ignore


def _one(name: str, value: Any) -> Column:
    if is_tensor(value):
        if value.is_nested:
            raise ValueError(f"field {name!r} is a nested tensor, which is several rows; use kv_batch_put")
        return as_column(name, value.unsqueeze(0))
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return as_column(name, value[None])
    return Column.objects([value], field=name)


def _value(column: Column) -> Any:
    import torch

    if column.kind == "object":
        return _stack(column.rows_list())
    values = torch.from_numpy(column.values)
    if column.dtype == BFLOAT16:
        values = values.view(torch.bfloat16)
    if column.offsets is not None:
        return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(column.offsets))
    if not column.shape:
        return values
    offsets = torch.arange(column.rows + 1) * column.shape[0]
    return torch.nested.nested_tensor_from_jagged(values.reshape(-1, *column.shape[1:]), offsets)


def _stack(values: Sequence[Any]) -> Any:
    """Objects as a NonTensorStack; tensors that are ragged in several dimensions as a strided nested tensor."""
    import torch
    from tensordict import NonTensorData, NonTensorStack

    tensors = bool(values) and all(is_tensor(value) and value.ndim for value in values)
    if tensors and len({(value.dtype, value.ndim) for value in values}) == 1:
        return torch.nested.as_nested_tensor(list(values), layout=torch.strided)
    return NonTensorStack(*(NonTensorData(value) for value in values))


def _is_tensordict(fields: Any) -> TypeGuard[TensorDict]:
    return hasattr(fields, "batch_size") and hasattr(fields, "keys")
