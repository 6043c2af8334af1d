"""`@register`: how a worker's method is called on a group.

| dispatch_mode | arguments | what the call gives |
|---|---|---|
| ONE_TO_ALL | the same to every rank | list, one result per rank |
| RANK_ZERO | the same to every rank | rank 0's result |
| DP_COMPUTE | each `KVBatchMeta` split by data-parallel rank, the rest the same | metrics merged to floats; else list |

`execute_mode=RANK_ZERO` runs the method on rank 0 only (never a method with collectives in it).
`blocking` as in verl: called where no event loop runs, the call waits and returns the result; `blocking=False`
returns the `Call`. Inside an event loop every call returns a `Call` to await.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "__registered__"


class Dispatch(Enum):
    RANK_ZERO = "rank_zero"
    ONE_TO_ALL = "one_to_all"
    DP_COMPUTE = "dp_compute"


class Execute(Enum):
    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True, slots=True)
class MethodSpec:
    name: str
    dispatch: Dispatch
    execute: Execute
    blocking: bool


def register(
    dispatch_mode: Dispatch = Dispatch.ONE_TO_ALL, execute_mode: Execute = Execute.ALL, blocking: bool = True
) -> Callable[[F], F]:
    """Mark a worker's method as callable on its group."""
    if dispatch_mode is Dispatch.DP_COMPUTE and execute_mode is Execute.RANK_ZERO:
        raise ValueError("DP_COMPUTE splits the batch over all ranks; with Execute.RANK_ZERO the rest would be lost")

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, MethodSpec(method.__name__, dispatch_mode, execute_mode, blocking))
        return method

    return mark


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """The registered methods of a worker class, inherited ones included; an override keeps the mark of its base."""
    found: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            spec = getattr(member, _ATTRIBUTE, None)
            if isinstance(spec, MethodSpec):
                found[name] = spec
    return found
