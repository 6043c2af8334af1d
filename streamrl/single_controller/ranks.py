"""The processes of a group, whatever they are, and what is true of all of them at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NoReturn

from streamrl.single_controller.errors import WorkerDied, WorkerGroupError
from streamrl.single_controller.worker import ClassWithInitArgs

Result = concurrent.futures.Future | asyncio.Future
"""What one rank will answer."""

ONLY = ""
"""The role of a worker that has its processes for itself."""


class Ranks(ABC):
    """One worker per role in each of `world_size` processes. All roles share the processes' fate: `failure`.

    Invariants: calls reach each rank in the order in which they were made, whatever their role, but for those beside;
    after a rank died, or left a collective half done, or the group was closed, `failure` says so, and no call is made
    any more.
    """

    def __init__(self, classes: Mapping[str, type], world_size: int, *, timeout: float) -> None:
        self.classes = dict(classes)
        self.world_size = world_size
        self.timeout = timeout
        """Seconds that a call may take, unless it says otherwise."""
        self.pids = [os.getpid()] * world_size
        self.failure: WorkerGroupError | None = None
        self.closing = False

    @abstractmethod
    def submit(
        self, rank: int, role: str, method: str, args: tuple, kwargs: dict[str, Any], *, beside: bool = False
    ) -> Result:
        """Send a call on its way; `beside`: out of the order of the others."""

    @property
    def busy(self) -> bool:
        """Whether a call is known to be under way on some rank."""
        return False

    @abstractmethod
    async def watch(self) -> NoReturn:
        """Wait for the first death of a rank; raises WorkerDied, or WorkerGroupError once the group is closed."""
        ...

    @abstractmethod
    async def end(self) -> None:
        """End the processes, without asking them."""

    def death(self, rank: int, method: str, error: BaseException) -> WorkerDied | None:
        """WorkerDied if `error`, the result of a call, means that the process is gone."""
        return None


def by_role(workers: ClassWithInitArgs | Mapping[str, ClassWithInitArgs]) -> dict[str, ClassWithInitArgs]:
    """One worker, or one per role. Raises TypeError or ValueError for anything else."""
    if isinstance(workers, ClassWithInitArgs):
        found = {ONLY: workers}
    elif isinstance(workers, Mapping) and workers and all(isinstance(role, str) and role for role in workers):
        found = dict(workers)
    else:
        raise ValueError(f"a worker group needs a ClassWithInitArgs, or a dict of them by role; got {workers!r}")
    for worker in found.values():
        if not isinstance(worker, ClassWithInitArgs) or not isinstance(worker.cls, type):
            raise TypeError(f"a worker group needs a class, not {getattr(worker, 'cls', worker)!r}")
    return found


def classes_of(workers: Mapping[str, ClassWithInitArgs]) -> dict[str, type]:
    return {role: worker.cls for role, worker in workers.items()}  # type: ignore[misc]  # by_role has looked


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> dict[str, ClassWithInitArgs]:
    """verl's step between roles and a group, which needs none here: the same roles, checked."""
    if isinstance(class_dict, ClassWithInitArgs):
        raise TypeError("create_colocated_worker_cls: expected a dict of ClassWithInitArgs by role")
    return by_role(class_dict)
