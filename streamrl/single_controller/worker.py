"""What runs on a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from streamrl.single_controller.decorator import Dispatch, register
from streamrl.single_controller.functions import NamedFunction
from streamrl.single_controller.mesh import MeshPlace


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where a worker stands in its group, and how the ranks find each other."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    rendezvous: str = ""
    """`file:///path` (ranks on one node) or `tcp://host:port` (rank 0 serves it); empty for a world of one."""
    timeout: float = 600.0
    """Seconds a collective may take."""


class Worker:
    """Base of worker classes: constructed on its rank with its RankInfo first."""

    def __init__(self, rank: RankInfo) -> None:
        self.rank = rank
        self._mesh_places: dict[str, MeshPlace] = {}

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Tell the group where this rank stands in a mesh, before the first call over it (in `init_model`).

        Ranks with the same `dp_rank` get the same rows; exactly one of them collects. Raises ValueError for a second,
        different place: the group asks once only.
        """
        place = MeshPlace(dp_rank, is_collect)
        if dp_rank < 0 or self._mesh_places.setdefault(mesh_name, place) != place:
            raise ValueError(f"mesh {mesh_name!r}: {place} after {self._mesh_places.get(mesh_name)}, on {self.rank}")

    @register(Dispatch.ONE_TO_ALL)
    def mesh_places(self) -> dict[str, MeshPlace]:
        """Where this rank stands, by the name of the mesh."""
        return self._mesh_places

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(worker, *args, **kwargs)` on every rank, batches split by rank. (verl's name for it.)"""
        return function(self, *args, **kwargs)

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Let go of everything; the group calls it before it ends the processes."""


class ClassWithInitArgs:
    """A worker class and the arguments it will be constructed with on each rank."""

    def __init__(self, cls: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def construct(self, rank: RankInfo) -> Any:
        return self.cls(rank, *self.args, **self.kwargs)


RayClassWithInitArgs = ClassWithInitArgs
"""verl's name."""


def loaded(args: tuple) -> tuple:
    """Arguments as the method gets them: a function that was sent by name is loaded here, on the rank."""
    return tuple(arg.load() if isinstance(arg, NamedFunction) else arg for arg in args)
