"""Copy published weights into a live `transformers` model, in place: all of them or none.

`stage` does everything that takes long or may fail, while the model serves; `copy_into` is a copy in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from streamrl.weight_sync.address import is_broadcast
from streamrl.weight_sync.delta_files import SUFFIX, changed, read_manifest
from streamrl.weight_sync.digest import weights_digest
from streamrl.weight_sync.protocol import WeightsDamaged, WeightsMismatch
from streamrl.weight_sync.shared_memory import read_weights

if TYPE_CHECKING:
    from streamrl.weight_sync.collective import Receiver

logger = logging.getLogger(__name__)

_NAMED = 4
"""How many names an error lists; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A version that has been read and fits the model: all tensors, or those that differ. `digest`: of all."""

    path: str
    version: int
    tensors: Mapping[str, Tensor]
    digest: str
    """Empty: of a delta, whose parts have checksums of their own."""
    base: int | None = None
    """Of which version the others are; None: all tensors are here."""

    def is_of(self, path: str, version: int) -> bool:
        return (self.path, self.version) == (path, version)


def stage(
    model: nn.Module, path: str, version: int, *, serves: int | None = None, receiver: Receiver | None = None
) -> Staged:
    """Read a version, check that it fits and touch all of its bytes, so that nothing can go wrong any more. Of a delta
    only what changes is read, if the model has the version before it (`serves`) to the bit; else all of it. A broadcast
    needs a `receiver`.

    Raises WeightsMissing, WeightsDamaged, WeightsMismatch; the model is not touched.
    """
    if path.endswith(SUFFIX) and (manifest := read_manifest(path)).base == serves:
        parameters = dict(model.named_parameters())
        try:
            return Staged(path, version, changed(Path(path), manifest, parameters), "", base=serves)
        except (WeightsDamaged, WeightsMismatch) as error:
            logger.warning("%s is no delta of what is served, all of version %d is read: %s", path, version, error)
    tensors = receiver.receive(path) if receiver and is_broadcast(path) else read_weights(path)
    check(model, tensors)
    return Staged(path, version, tensors, weights_digest(tensors.items()))


def load_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the model's parameters (casting to their dtype), after checking every name and shape.

    Tied parameters need one of their names only; if several are given they must be equal. Raises WeightsMismatch.
    """
    check(model, tensors)
    copy_into(model, tensors)


def copy_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """After `check`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def check(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Whether these are the model's weights, by names and shapes. Raises WeightsMismatch."""
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


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) + more) or "none"
