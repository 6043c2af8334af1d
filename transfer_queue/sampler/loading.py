"""Samplers by name: what travels to the controller is a name and plain parameters, never an object."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import Invalid
from transfer_queue.sampler.base import BaseSampler, SequentialSampler
from transfer_queue.sampler.grpo import GRPOGroupNSampler
from transfer_queue.sampler.priority import PrioritySampler, WeightedSampler
from transfer_queue.sampler.ranks import RankAwareSampler, SeqlenBalancedSampler

_OURS: dict[str, type[BaseSampler]] = {
    cls.__name__: cls
    for cls in (
        SequentialSampler,
        GRPOGroupNSampler,
        RankAwareSampler,
        SeqlenBalancedSampler,
        PrioritySampler,
        WeightedSampler,
    )
}


def sampler_spec(sampler: Any) -> dict[str, Any]:
    """{"name", and parameters} of a sampler given by name, as such a dict, as class, or as one of our own instances.

    Raises Invalid, naming the remedy, for an instance of any other class.
    """
    if isinstance(sampler, str):
        return {"name": sampler}
    if isinstance(sampler, Mapping):
        spec = {str(name): value for name, value in sampler.items()}
        if not isinstance(spec.get("name"), str):
            raise Invalid(f"controller.sampler is {spec}; it needs a `name`, one of {sorted(_OURS)} or 'module:Class'")
        return spec
    if isinstance(sampler, type) and issubclass(sampler, BaseSampler):
        return {"name": _name(sampler)}
    if type(sampler) in _OURS.values():
        return {"name": type(sampler).__name__, **sampler.parameters()}
    name = f"{type(sampler).__module__}:{type(sampler).__qualname__}"
    raise Invalid(
        f"controller.sampler is a {type(sampler).__qualname__} object; objects are not sent to the controller. Give "
        f"its class by name and its parameters, as {{'name': {name!r}, ...}}; the module must be importable where the "
        "controller runs"
    )


def load_sampler(spec: Mapping[str, Any]) -> BaseSampler:
    """The sampler that `sampler_spec` described. Raises Invalid if there is none, or for wrong parameters."""
    name, parameters = str(spec["name"]), {key: value for key, value in spec.items() if key != "name"}
    cls = _OURS.get(name) or _imported(name)
    try:
        inspect.signature(cls).bind(**parameters)
        return cls(**parameters)
    except (TypeError, ValueError) as error:
        raise Invalid(f"sampler {name!r} cannot be made with {parameters}: {error}") from error


def _imported(name: str) -> type[BaseSampler]:
    module, _, qualname = name.partition(":")
    if module == "__main__":
        raise Invalid(
            f"sampler {name!r} is of the program's main module, which the controller cannot import: move it "
            "to a module of its own"
        )
    if not qualname:
        raise Invalid(f"no sampler {name!r}; there are {sorted(_OURS)}, or give your own as 'module:Class'")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise Invalid(f"sampler {name!r} cannot be imported where the controller runs: {error}") from error
    if not (isinstance(found, type) and issubclass(found, BaseSampler)):
        raise Invalid(f"sampler {name!r} is no subclass of transfer_queue.BaseSampler")
    return found


def _name(cls: type[BaseSampler]) -> str:
    return cls.__name__ if _OURS.get(cls.__name__) is cls else f"{cls.__module__}:{cls.__qualname__}"
