"""Many ranks in this process, one after the other: what dispatch does, without processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Mapping
from typing import Any, NoReturn

from streamrl.single_controller import ClassWithInitArgs, RankInfo, WorkerGroup
from streamrl.single_controller.ranks import Ranks, Result, by_role, classes_of
from streamrl.single_controller.worker import loaded


class InlineRanks(Ranks):
    def __init__(self, world_size: int, workers: dict[str, ClassWithInitArgs]) -> None:
        super().__init__(classes_of(workers), world_size, timeout=5.0)
        self.workers = [
            {role: worker.construct(RankInfo(rank, world_size)) for role, worker in workers.items()}
            for rank in range(world_size)
        ]
        self.calls: list[str] = []
        """Of rank 0."""

    def submit(
        self, rank: int, role: str, method: str, args: tuple, kwargs: dict[str, Any], *, beside: bool = False
    ) -> Result:
        if rank == 0:
            self.calls.append(method)
        done: concurrent.futures.Future = concurrent.futures.Future()
        try:
            done.set_result(getattr(self.workers[rank][role], method)(*loaded(args), **kwargs))
        except Exception as error:  # noqa: BLE001
            done.set_exception(error)
        return done

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    async def end(self) -> None: ...


class InlineWorkerGroup(WorkerGroup):
    _ranks: InlineRanks

    def __init__(self, world_size: int, workers: ClassWithInitArgs | Mapping[str, ClassWithInitArgs]) -> None:
        super().__init__(InlineRanks(world_size, by_role(workers)))

    @property
    def calls(self) -> list[str]:
        return self._ranks.calls
