"""The servers that are out: asked with growing pauses until one is healthy at the version in service.

A server that died under the first requests after it came back is asked later each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from agent_loop.llm.answers import Sense, cancelled_itself, trouble
from agent_loop.llm.awake import AwakeTime
from agent_loop.llm.protocol import LLMServer
from agent_loop.llm.retry import Patience
from agent_loop.llm.router import Router

logger = logging.getLogger(__name__)


class Probes:
    """Invariant: one probe per server at most, and none of a server that is in service."""

    def __init__(
        self, router: Router, patience: Patience, awake: AwakeTime, sense: Sense, on_back: Callable[[], None],
        on_task: Callable[[asyncio.Task[None]], None],
    ) -> None:  # fmt: skip
        """`awake` knows whether all servers sleep: one that is awake then is not in service. `on_back()` after a
        re-admission; `on_task(task)` for each that was started, so that it is looked after."""
        self._router, self._patience, self._awake, self._sense = router, patience, awake, sense
        self._on_back, self._on_task = on_back, on_task
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def start(self, name: str, server: LLMServer) -> None:
        if not self._closed and name not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._probe(name, server), name=f"probe-{name}")
            self._tasks[name] = task
            self._on_task(task)

    def stop(self, name: str) -> None:
        if task := self._tasks.pop(name, None):
            task.cancel()

    def close(self) -> list[asyncio.Task[None]]:
        """The tasks, cancelled; no further one starts."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        return list(self._tasks.values())

    async def _probe(self, name: str, server: LLMServer) -> None:
        router, patience = self._router, self._patience
        state = router.servers[name]
        doublings = min(max(0, max(state.failures, state.broken) - 1), 20)
        pause = min(patience.first_pause * 2**doublings, patience.longest_pause)
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, patience.longest_pause)
            try:
                async with asyncio.timeout(patience.probe):
                    load = await server.load()
                self._sense.check_load(load, name)
            except (ConnectionError, TimeoutError) as error:
                router.servers[name].reason = f"health check: {error or type(error).__name__}"
                continue
            except (Exception, asyncio.CancelledError) as error:  # a server of one's own may raise anything
                if isinstance(error, asyncio.CancelledError) and cancelled_itself():
                    raise
                router.servers[name].reason = f"health check: {trouble(error, name, 'load')}"
                continue
            if self._awake.asleep and not load.asleep:  # training has its device; the next beat lets it fall asleep
                router.servers[name].reason = "it came back awake while all servers sleep"
                continue
            if router.readmit(name, load.weight_version):
                logger.info("LLM server %s is back at weight version %d", name, load.weight_version)
                del self._tasks[name]
                self._on_back()
                return
