"""Agent workers as Ray actors, one process each."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import ray
from ray.exceptions import RayActorError, RayError

from agent_loop.llm.answers import Sense
from agent_loop.llm.client import Patience, RoutedClient
from agent_loop.llm.fleet import FleetNews
from agent_loop.llm.protocol import LLMServer
from agent_loop.llm.router import Router
from agent_loop.user_code import with_place
from agent_loop.worker import AgentLoopWorker, WorkerConfig
from streamrl.monitor.events import EventLog
from streamrl.process_log import write_to
from streamrl.runtime.run_dir import LOGS
from transfer_queue.client import QueueClient

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
STOP_SECONDS = 15.0


class AgentWorkerActor:
    """An AgentLoopWorker with a queue client, an LLM client (and one for the teacher) and an event log of its own."""

    async def start(
        self, name: str, config: WorkerConfig, address: dict[str, str], servers: Mapping[str, LLMServer],
        teachers: Mapping[str, LLMServer], run_dir: str,
    ) -> int:  # fmt: skip
        """Connect; the process id."""
        write_to(Path(run_dir) / LOGS / f"{name}.log")
        try:
            await self._start(name, config, address, servers, teachers, run_dir)
        except Exception as error:  # its traceback stays in this process
            logger.exception("%s cannot start", name)
            raise with_place(error)  # noqa: B904
        return os.getpid()

    async def _start(
        self, name: str, config: WorkerConfig, address: dict[str, str], servers: Mapping[str, LLMServer],
        teachers: Mapping[str, LLMServer], run_dir: str,
    ) -> None:  # fmt: skip
        self._events = EventLog(Path(run_dir) / "events", name)
        self._queue = await QueueClient.connect(address, name=name)
        router = Router(servers, offset=crc32(name.encode()))  # not the one at which every worker's ties begin
        self._llm = RoutedClient(
            servers, patience=Patience(answer=config.answer_timeout), router=router, sense=Sense(config.vocab_size)
        )
        self._teacher = RoutedClient(teachers) if teachers else None
        self._worker = AgentLoopWorker(
            self._queue, self._llm, config, name=name, on_span=self._events.span_at, teacher=self._teacher
        )

    async def serve(self) -> None:
        """Returns when stopped; an error of the worker is raised here."""
        try:
            await self._worker.run()
        finally:
            await self._llm.close()
            if self._teacher is not None:
                await self._teacher.close()
            await self._queue.close()
            self._events.close()

    async def cancel(self, partition: str, uids: list[str]) -> None:
        self._worker.cancel(partition, uids)

    async def reserve(self, servers: list[str]) -> None:
        self._worker.reserve(servers)

    async def hear(self, news: FleetNews) -> dict[str, tuple[int, int]]:
        return self._worker.hear(news)

    async def stop(self) -> None:
        await self._worker.stop()


class RayWorker:
    """Implements agent_loop.manager.WorkerHandle."""

    def __init__(self, name: str, actor: Any, pid: int) -> None:
        self.name = name
        self.pid: int | None = pid
        self._actor = actor
        self._serving = asyncio.ensure_future(_answer(actor.serve.remote()))

    async def wait_dead(self) -> str:
        try:
            await asyncio.shield(self._serving)
        except RayActorError as error:
            return f"process {self.pid} is gone ({type(error).__name__})"
        except RayError as error:
            return str(getattr(error, "cause", None) or error).splitlines()[0]
        return "stopped"

    async def cancel(self, partition: str, uids: list[str]) -> None:
        async with asyncio.timeout(STOP_SECONDS):
            await _answer(self._actor.cancel.remote(partition, uids))

    async def reserve(self, servers: list[str]) -> None:
        async with asyncio.timeout(STOP_SECONDS):
            await _answer(self._actor.reserve.remote(servers))

    async def hear(self, news: FleetNews) -> dict[str, tuple[int, int]]:
        async with asyncio.timeout(STOP_SECONDS):
            return await _answer(self._actor.hear.remote(news))

    async def stop(self) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._actor.stop.remote()
        except (RayError, TimeoutError):
            pass  # it is gone, or will be
        ray.kill(self._actor)
        await asyncio.wait([self._serving])
        self._serving.exception()


class RaySpawner:
    """Implements agent_loop.manager.Spawner. A worker starts with the servers that there are then."""

    def __init__(
        self, config: WorkerConfig, address: dict[str, str], servers: Mapping[str, LLMServer],
        teachers: Mapping[str, LLMServer], run_dir: Path,
    ) -> None:  # fmt: skip
        self._config, self._address, self._run_dir = config, address, str(run_dir)
        self._servers, self._teachers = servers, teachers

    async def spawn(self, name: str) -> RayWorker:
        actor: Any = ray.remote(AgentWorkerActor).options(num_cpus=0, max_restarts=0, max_concurrency=16).remote()
        try:
            served, teachers = dict(self._servers), dict(self._teachers)
            start = actor.start.remote(name, self._config, self._address, served, teachers, self._run_dir)
            pid = await _answer(start)
        except BaseException:  # also when it took too long
            ray.kill(actor)
            raise
        return RayWorker(name, actor, pid)


async def _answer(ref: Any) -> Any:
    return await ref
