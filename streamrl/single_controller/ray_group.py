"""A worker group whose ranks are Ray actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from streamrl.single_controller.pool import ResourcePool
from streamrl.single_controller.ranks import by_role
from streamrl.single_controller.ray_ranks import RayRanks
from streamrl.single_controller.worker import ClassWithInitArgs
from streamrl.single_controller.worker_group import WorkerGroup


class RayWorkerGroup(WorkerGroup):
    """One process per rank of the pool, in it one worker, or one per role.

        group = RayWorkerGroup(pool, {"actor": ClassWithInitArgs(...), "critic": ClassWithInitArgs(...)})
        views = group.spawn()
        await views["actor"].update_actor(batch)

    Constructing blocks for some seconds: in an event loop, `await asyncio.to_thread(...)`.
    """

    _ranks: RayRanks

    def __init__(
        self, pool: ResourcePool, worker: ClassWithInitArgs | Mapping[str, ClassWithInitArgs], *, name: str = "",
        timeout: float = 600.0, start_timeout: float = 120.0, env: dict[str, str] | None = None,
        rendezvous: Literal["auto", "file", "tcp"] = "auto", log_dir: str = "",
    ) -> None:  # fmt: skip
        """`log_dir`: a file per rank there takes what the ranks log and print; empty: Ray's files do."""
        workers = by_role(worker)
        name = name or "+".join(role or made.cls.__name__ for role, made in workers.items())
        super().__init__(
            RayRanks(
                pool, workers, name=name, timeout=timeout, start_timeout=start_timeout, env=env or {},
                rendezvous=rendezvous, log_dir=log_dir,
            )
        )  # fmt: skip

    @property
    def name(self) -> str:
        return self._ranks.name

    @property
    def logs(self) -> list[str]:
        """The file with a rank's last words, on its node."""
        return self._ranks.logs
