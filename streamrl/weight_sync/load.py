"""Copy published weights into a live `transformers` model, in place: all of them or none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from streamrl.weight_sync.protocol import WeightsMismatch

_NAMED = 4
"""How many names an error lists; the rest is counted."""


def load_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the model's parameters (casting to their dtype), after checking every name and shape.

    Tied parameters need one of their names only; if several are given they must be equal. Raises WeightsMismatch.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    unknown = [name for name in tensors if name not in parameters]
    missing = [tied[0] for tied in names.values() if not any(name in tensors for name in tied)]
    if unknown or missing:
        raise WeightsMismatch(
            f"not this model's weights: missing {_some(missing)}; unknown {_some(unknown)}; nothing was overwritten"
        )
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            wanted, got = tuple(parameters[name].shape), tuple(tensor.shape)
            raise WeightsMismatch(f"{name} has shape {got}, the model's {wanted}; nothing was overwritten")
    for tied in names.values():
        given = [name for name in tied if name in tensors]
        for other in given[1:]:
            if not torch.equal(tensors[given[0]], tensors[other]):
                raise WeightsMismatch(f"{given[0]} and {other} are tied but differ here; nothing was overwritten")
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) + more) or "none"
