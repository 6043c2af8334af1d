"""`@register`: how a worker's method is called on a group.

| dispatch_mode | arguments | what the call gives |
|---|---|---|
| ONE_TO_ALL | the same to every rank | list, one result per rank |
| RANK_ZERO | the same to every rank | rank 0's result |
| ALL_TO_ALL | lists, one element per rank | list, one result per rank |
| DP_COMPUTE | each `KVBatchMeta` split by rank, the rest the same | metrics merged to floats; else list |
| DP_COMPUTE_PROTO | each `DataProto`, `TensorDict`, `KVBatchMeta` split by rank, the rest the same | one batch; metrics merged; else list |
| DP_COMPUTE_PROTO_WITH_FUNC | the same, after a function, by its name | the same |
| DP_COMPUTE_METRIC | as DP_COMPUTE_PROTO, but no row is there twice: shares may differ by one | metrics merged; else list |
| `make_nd_compute_dataproto_dispatch_fn(mesh)` | as DP_COMPUTE_PROTO, but split by data-parallel rank in `mesh` | the same, of the ranks that collect |
| `MeshDispatch(mesh, references)` | the same, and a `DataProto` is split as the references made from it: `HeldRows` | the same |

Rows of one call are split once: all arguments with rows must have the same number, and each rank gets the same rows of
each. `DataProto` and `TensorDict` are cut in consecutive shares of one size (rows are repeated where it does not divide,
and their results dropped); `KVBatchMeta` in shares of about equal cost, which may differ in size and be empty. A result
with rows (k per row of the share) comes back in the order of the rows that were given.

A function goes by name, `package.module:function` or `path/to/file.py:function`, and is loaded on the rank: code is
never sent, so what runs there is what is installed there. The method's first argument is then the function itself.

`execute_mode=RANK_ZERO` runs the method on rank 0 only (never a method with collectives in it).
`beside=True` is for a method that waits for something on the rank: it neither waits for the calls made before it nor
holds up those after it.
`blocking` as in verl: called where no event loop runs, the call waits and returns the result; `blocking=False`
returns the `Call`. Inside an event loop every call returns a `Call` to await.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from streamrl.single_controller.data_proto import DataProto
    from transfer_queue.metadata import KVBatchMeta

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "__registered__"


class Dispatch(Enum):
    RANK_ZERO = "rank_zero"
    ONE_TO_ALL = "one_to_all"
    ALL_TO_ALL = "all_to_all"
    DP_COMPUTE = "dp_compute"
    DP_COMPUTE_PROTO = "dp_compute_proto"
    DP_COMPUTE_PROTO_WITH_FUNC = "dp_compute_proto_with_func"
    DP_COMPUTE_METRIC = "dp_compute_metric"


@dataclass(frozen=True, slots=True)
class MeshDispatch:
    """Split by the data-parallel ranks of a mesh, which the ranks know and the group asks for at the first call."""

    mesh: str
    references: Callable[[DataProto], KVBatchMeta] | None = None
    """What a row is and costs, for methods that take references and may be given the rows themselves."""


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> MeshDispatch:
    """The dispatch mode of methods whose ranks form the mesh `mesh_name` (verl's name for it)."""
    return MeshDispatch(mesh_name)


class Execute(Enum):
    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True, slots=True)
class MethodSpec:
    name: str
    dispatch: Dispatch | MeshDispatch
    execute: Execute
    blocking: bool
    beside: bool = False
    """In a thread of its own on the rank, whatever other call runs there. Such calls keep an order among themselves."""


def register(
    dispatch_mode: Dispatch | MeshDispatch = Dispatch.ONE_TO_ALL, execute_mode: Execute = Execute.ALL,
    blocking: bool = True, beside: bool = False,
) -> Callable[[F], F]:  # fmt: skip
    """Mark a worker's method as callable on its group."""
    if not isinstance(dispatch_mode, Dispatch | MeshDispatch):
        raise TypeError(f"register: dispatch_mode={dispatch_mode!r} is no Dispatch; did you forget the parentheses?")
    if execute_mode is Execute.RANK_ZERO and dispatch_mode not in (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL):
        raise ValueError(
            f"{dispatch_mode} splits its arguments over all ranks; with Execute.RANK_ZERO the rest would be lost"
        )

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, MethodSpec(method.__name__, dispatch_mode, execute_mode, blocking, beside))
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
