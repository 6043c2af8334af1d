"""Keeps the agent workers alive: starts them through a spawner, and starts another for each that dies.

    spawn ─► wait_dead ─► release its leases in the queue ─► spawn under a new name ─► …

The spawner decides what a worker is (a task here, a Ray actor in streamrl.runtime); the manager decides when.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from agent_loop.llm.fleet import FleetNews
from agent_loop.plugins import PluginError
from agent_loop.user_code import told
from agent_loop.worker import AgentLoopWorker
from transfer_queue.client import QueueClient
from transfer_queue.errors import DeadlineExceeded, Disconnected

logger = logging.getLogger(__name__)

MAX_RESTARTS_PER_MINUTE = 6
"""Of all workers together. A machine that loses workers faster is ill, and restarting only hides why."""


BROKEN_CODE = (PluginError, ImportError, SyntaxError, NameError)
"""What a start raises again and again until somebody changes a file or a setting."""


class WorkerHandle(Protocol):
    """A worker that runs somewhere."""

    name: str
    pid: int | None

    async def wait_dead(self) -> str:
        """Returns, with the reason, when the worker has ended for whatever reason."""
        ...

    async def cancel(self, partition: str, uids: list[str]) -> None:
        """End these groups, as far as it runs them."""
        ...

    async def reserve(self, servers: list[str]) -> None:
        """From now on it uses these LLM servers, and no others, for groups whose tag says `reserved` alone."""
        ...

    async def hear(self, news: FleetNews) -> dict[str, tuple[int, int]]:
        """Of the LLM servers. By server: requests and tokens of this worker in flight."""
        ...

    async def stop(self) -> None:
        """End it; running groups go back to the queue. Returns when it has ended."""
        ...


class Spawner(Protocol):
    async def spawn(self, name: str) -> WorkerHandle:
        """Start a worker whose leases are held under `name`. An exception counts as the death of this worker; nothing
        of it is left then, nor when the call is cancelled."""
        ...


class WorkersKeepDying(RuntimeError):
    """More restarts than a minute allows, or as many starts in a row that failed, however long each took."""


RestartHook = Callable[[str, str], None]
"""(name of the dead worker, reason)."""


def _ignore(name: str, reason: str) -> None:
    pass


class AgentLoopManager:
    """Invariants: while `run` runs there are `num_workers` workers, or one is being started; a name is never used
    twice, so a zombie's leases are not those of its successor; when `run` has ended no worker is left."""

    def __init__(
        self,
        spawner: Spawner,
        queue: QueueClient,
        num_workers: int,
        *,
        name: str = "agent",
        max_restarts_per_minute: int = MAX_RESTARTS_PER_MINUTE,
        spawn_timeout: float = 120.0,
        on_restart: RestartHook = _ignore,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, not {num_workers}")
        self.workers: dict[str, WorkerHandle] = {}
        self.started = asyncio.Event()
        """Set once all workers have been started for the first time."""
        self.restarts = 0
        self._spawner = spawner
        self._queue = queue
        self._num_workers = num_workers
        self._name = name
        self._max_restarts = max_restarts_per_minute
        self._spawn_timeout = spawn_timeout
        self._on_restart = on_restart
        self._reserved: list[str] = []
        self._recent: deque[float] = deque()
        self._ever_started = False
        self._failed_starts = 0
        """In a row. Starts that take long to fail never exceed what a minute allows."""

    @property
    def pids(self) -> dict[str, int | None]:
        return {name: worker.pid for name, worker in self.workers.items()}

    async def run(self) -> None:
        """Supervise until cancelled. Raises WorkersKeepDying (in an ExceptionGroup)."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(self._num_workers):
                    tasks.create_task(self._keep_one(index), name=f"supervise-{self._name}-{index}")
        finally:
            await self._stop_all()

    async def _keep_one(self, index: int) -> None:
        attempt = 0
        while True:
            name = f"{self._name}-{index}" + (f"-{attempt}" if attempt else "")
            reason = await self._live(name)
            logger.warning("agent worker %s died: %s", name, reason)
            self._on_restart(name, reason)
            await self._release(name)
            self._count_restart(name, reason)
            attempt += 1

    async def cancel(self, partition: str, uids: list[str]) -> None:
        """Whoever runs one of these groups ends it now: they were dropped, so its leases have ended already. A worker
        that cannot be told finds out when it renews them."""
        told = await asyncio.gather(
            *(worker.cancel(partition, uids) for worker in self.workers.values()), return_exceptions=True
        )
        for result in told:
            if isinstance(result, Exception):
                logger.info("an agent worker was not told of cancelled groups: %s", _first_line(result))

    async def reserve(self, servers: list[str]) -> None:
        """From now on these LLM servers, and no others, are for groups whose tag says `reserved`; also of workers that
        are yet to start. Returns when each has been told, or could not be."""
        self._reserved = servers
        await asyncio.gather(*(self._tell_reserved(worker) for worker in self.workers.values()))

    async def _tell_reserved(self, worker: WorkerHandle) -> None:
        try:
            await worker.reserve(self._reserved)
        except Exception as error:  # noqa: BLE001 (whatever it is: it dies of it elsewhere, or goes on unreserved)
            logger.warning("agent worker %s was not told of reserved servers: %s", worker.name, _first_line(error))

    async def _live(self, name: str) -> str:
        """The life of one worker, from its start to its death; the reason of that."""
        try:
            worker = await self._spawn(name)
        except Exception as error:  # noqa: BLE001 (a spawner may fail in any way; the cause is counted and reported)
            self._failed_starts += 1
            self._check_code(name, error)
            return f"it could not be started: {_first_line(error)}"
        self._failed_starts, self._ever_started = 0, True
        self.workers[name] = worker
        if self._reserved:
            await self._tell_reserved(worker)
        if len(self.workers) == self._num_workers:
            self.started.set()
        reason = await worker.wait_dead()
        del self.workers[name]
        return reason

    def _check_code(self, name: str, error: Exception) -> None:
        """Raises WorkersKeepDying where no worker ever started and the next one will fail likewise."""
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, BROKEN_CODE) and not self._ever_started:
            raise WorkersKeepDying(f"agent worker {name} could not be started: {_first_line(error)}") from None

    async def _spawn(self, name: str) -> WorkerHandle:
        try:
            async with asyncio.timeout(self._spawn_timeout) as limit:
                return await self._spawner.spawn(name)
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(f"no answer within {self._spawn_timeout:g} s; see its log") from None

    async def _release(self, name: str) -> None:
        """Its groups go to others now; without this they would when the leases run out."""
        try:
            await self._queue.release_holder(name)
        except (Disconnected, DeadlineExceeded) as error:
            logger.warning("leases of %s not released, they will run out: %s", name, error)

    def _count_restart(self, name: str, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        self.restarts += 1
        self._recent.append(now)
        while self._recent[0] < now - 60.0:
            self._recent.popleft()
        if len(self._recent) > self._max_restarts:
            raise WorkersKeepDying(
                f"{len(self._recent)} agent workers died within a minute (at most {self._max_restarts} are replaced); "
                f"the last, {name}: {reason}"
            )
        if self._failed_starts > self._max_restarts:
            raise WorkersKeepDying(
                f"{self._failed_starts} starts of agent workers failed in a row (at most {self._max_restarts} may); "
                f"the last, {name}: {reason}"
            )

    async def _stop_all(self) -> None:
        results = await asyncio.gather(*(worker.stop() for worker in self.workers.values()), return_exceptions=True)
        for name, result in zip(self.workers, results, strict=True):
            if isinstance(result, Exception):
                logger.warning("agent worker %s did not stop cleanly: %r", name, result)
        self.workers.clear()


def _first_line(error: Exception) -> str:
    """With the place in the user's code that it came from."""
    return told(
        getattr(error, "cause", None) or error, whole=False
    )  # Ray's error for one of ours; its own text is a traceback


class TaskWorker:
    """A worker as a task of this event loop. Implements WorkerHandle."""

    pid: int | None = None

    def __init__(self, worker: AgentLoopWorker) -> None:
        self.name = worker.name
        self.worker = worker
        self._task = asyncio.get_running_loop().create_task(worker.run(), name=worker.name)

    async def wait_dead(self) -> str:
        await asyncio.wait([self._task])
        if self._task.cancelled():
            return "cancelled"
        error = self._task.exception()
        return f"{type(error).__name__}: {error}" if error else "stopped"

    async def cancel(self, partition: str, uids: list[str]) -> None:
        self.worker.cancel(partition, uids)

    async def reserve(self, servers: list[str]) -> None:
        self.worker.reserve(servers)

    async def hear(self, news: FleetNews) -> dict[str, tuple[int, int]]:
        return self.worker.hear(news)

    async def stop(self) -> None:
        if not self._task.done():
            await self.worker.stop()
        await asyncio.wait([self._task])

    def kill(self) -> None:
        """End it as abruptly as a task can."""
        self._task.cancel()


class TaskSpawner:
    """Runs workers as tasks of this event loop (runtime=local). Implements Spawner."""

    def __init__(self, make: Callable[[str], Awaitable[AgentLoopWorker]]) -> None:
        """`make(name)` builds a worker, with a queue client of its own if it wants one."""
        self._make = make

    async def spawn(self, name: str) -> TaskWorker:
        return TaskWorker(await self._make(name))
