"""TensorDicts of the kv verbs, to columns and back. The only room that imports torch and tensordict, and only in
functions that make tensors.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from transfer_queue.storage.columns import BFLOAT16, Column
from transfer_queue.storage.convert import as_column, is_tensor

if TYPE_CHECKING:
    from tensordict import TensorDict

# tensordict calls it, and its user can do nothing about it.
logging.getLogger("torch.fx._symbolic_trace").addFilter(lambda record: "is_fx_tracing" not in record.getMessage())


_loaded = threading.Event()


def load() -> None:
    """Import what tensors are made with: seconds at the first call, in which a client's loop would serve nobody."""
    import tensordict  # noqa: F401

    _loaded.set()


async def load_beside() -> None:
    """`load`, without holding up the event loop of the caller either."""
    if not _loaded.is_set():
        await asyncio.to_thread(load)


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


def tensors_of(column: Column) -> list[Any]:
    """The rows of a column of numbers as tensors: what the rows of a field are that have several dtypes or shapes."""
    import torch

    tensors = [torch.from_numpy(np.array(row)) for row in column.rows_list()]
    return [tensor.view(torch.bfloat16) for tensor in tensors] if column.dtype == BFLOAT16 else tensors


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
        return jagged(values, column.offsets)
    if not column.shape:
        return values
    packed = values.reshape(column.rows * column.shape[0], *column.shape[1:])
    return jagged(packed, np.arange(column.rows + 1) * column.shape[0])


def jagged(values: Any, offsets: np.ndarray) -> Any:
    """Row i is values[offsets[i]:offsets[i + 1]], int64. torch is told the longest, else it pads each row to the sum of
    all."""
    import torch

    lengths = np.diff(offsets)
    least, most = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    where = torch.from_numpy(offsets).to(values.device)
    return torch.nested.nested_tensor_from_jagged(values, where, min_seqlen=least, max_seqlen=most)


def _stack(values: Sequence[Any]) -> Any:
    """Objects as a NonTensorStack; tensors that are ragged in several dimensions as a strided nested tensor."""
    import torch
    from tensordict import NonTensorStack

    tensors = bool(values) and all(is_tensor(value) and value.ndim for value in values)
    if tensors and len({(value.dtype, value.ndim) for value in values}) == 1:
        return torch.nested.as_nested_tensor(list(values), layout=torch.strided)
    return NonTensorStack(*wrapped(values))


def wrapped(values: Sequence[Any]) -> list[Any]:
    """`NonTensorData(value)` for each value, six times as fast as its constructor: each is a copy of what the
    constructor makes of the first value of that type, as long as it is of a form that can be copied."""
    from tensordict import NonTensorData

    makers: dict[type, Callable[[Any], Any]] = {}
    result = []
    for value in values:
        make = makers.get(type(value))
        if make is None:
            make = makers[type(value)] = _maker(value) if type(value) in _AS_THEY_ARE else NonTensorData
        result.append(make(value))
    return result


_AS_THEY_ARE = frozenset({str, bytes, int, float, bool, type(None), dict, list, tuple})


def _maker(value: Any) -> Callable[[Any], Any]:
    """What makes NonTensorData of values of this type: a copy of a prototype, or the constructor if tensordict builds
    them in a way that is not known here."""
    from tensordict import NonTensorData, TensorDict

    prototype = NonTensorData(value)
    outer, inner = vars(prototype), vars(prototype).get("_tensordict")
    plain = outer.get("_non_tensordict")
    known = {"_tensordict", "_non_tensordict", "_is_initialized"}
    if set(outer) != known or outer["_is_initialized"] is not True or type(inner) is not TensorDict:
        return NonTensorData
    state = dict(vars(inner))
    if state.pop("_tensordict", None) != {} or any(isinstance(part, (dict, list, set)) for part in state.values()):
        return NonTensorData
    if type(plain) is not dict or plain.get("data") is not value or not _is_flat(plain):
        return NonTensorData
    new, put, kind, parts = object.__new__, object.__setattr__, type(prototype), tuple(state.items())

    def make(value: Any) -> Any:
        empty, data = new(TensorDict), new(kind)
        for name, part in parts:  # one by one: no `__dict__` is made, which the garbage collector would go through
            put(empty, name, part)
        put(empty, "_tensordict", {})
        put(data, "_tensordict", empty)
        put(data, "_non_tensordict", {**plain, "data": value})
        put(data, "_is_initialized", True)
        return data

    return make


def _is_flat(plain: Mapping[str, Any]) -> bool:
    return all(isinstance(part, (bool, type(None))) for name, part in plain.items() if name != "data")


def _is_tensordict(fields: Any) -> TypeGuard[TensorDict]:
    return hasattr(fields, "batch_size") and hasattr(fields, "keys")
