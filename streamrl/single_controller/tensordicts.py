"""Rows of TensorDicts, also of jagged ones, which torch can neither index by rows nor concatenate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase


def take_rows(batch: TensorDictBase, rows: Sequence[int]) -> TensorDict:
    """These rows, in this order; a row may be taken several times."""
    index = torch.as_tensor(list(rows), dtype=torch.long)
    columns: dict[str, Any] = {}
    for name in batch.keys():  # noqa: SIM118
        value = batch.get(name)
        if is_jagged(value):
            values = value.unbind()
            columns[name] = _jagged([values[i] for i in index.tolist()], value)
        else:
            columns[name] = value[index.to(value.device) if isinstance(value, torch.Tensor) else index]
    return TensorDict(columns, batch_size=[len(index)], device=batch.device)


def join_rows(batches: Sequence[TensorDictBase]) -> TensorDict:
    """All rows. Raises ValueError when the fields differ, or a dense field has other shapes."""
    first = batches[0]
    names = set(first.keys())
    for part in batches[1:]:
        if set(part.keys()) != names:
            differ = sorted(str(name) for name in names ^ set(part.keys()))
            raise ValueError(f"cannot join TensorDicts: fields {differ} are in some only")
    columns: dict[str, Any] = {}
    for name in first.keys():  # noqa: SIM118
        values = [part.get(name) for part in batches]
        if any(is_jagged(value) for value in values):
            columns[name] = _jagged([row for value in values for row in value.unbind()], values[0])
        elif isinstance(values[0], torch.Tensor):
            if len({tuple(value.shape[1:]) for value in values}) != 1:
                raise ValueError(
                    f"cannot join field {name!r}: rows of shapes {[list(value.shape[1:]) for value in values]}; "
                    "pad them to one length, or return a jagged nested tensor"
                )
            columns[name] = torch.cat(values)
        else:
            columns[name] = torch.cat(values)  # nested TensorDicts and NonTensorStacks know how
    return TensorDict(columns, batch_size=[sum(part.batch_size[0] for part in batches)], device=first.device)


def is_jagged(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested


def _jagged(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    if rows:
        return torch.nested.as_nested_tensor(rows, layout=like.layout)
    if like.layout is torch.jagged:
        return no_jagged_rows(like.values())
    return torch.nested.nested_tensor([], dtype=like.dtype, device=like.device, layout=like.layout)


def no_jagged_rows(like: torch.Tensor) -> torch.Tensor:
    """A jagged tensor of 0 rows, which torch makes of no list; `like` is [elements, ...], the values of such rows."""
    offsets = torch.zeros(1, dtype=torch.long, device=like.device)
    empty = like.new_empty(0, *like.shape[1:])
    return torch.nested.nested_tensor_from_jagged(empty, offsets, min_seqlen=0, max_seqlen=0)
