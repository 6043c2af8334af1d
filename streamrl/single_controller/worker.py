"""What runs on a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from streamrl.single_controller.decorator import Dispatch, register


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
