"""All LLM servers of a run as one: a new version goes to each of them, loads come from each of them.

    consumes  WeightInfo of a version that is complete (weight_sync)
    produces  UpdateReport: who serves it, who does not and why
    waits for every server, at the same time, until the deadline

A dead server is not waited for: it loads LATEST when it comes back, before it serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_loop.llm.protocol import LLMServer, ServerDied, ServerLoad
from streamrl.weight_sync import WeightError, WeightInfo, WeightsMissing

UPDATE_SECONDS = 120.0
"""For one server to load a version; it includes the decode step or the prefill under way."""
LOAD_SECONDS = 10.0
"""For one server to tell its load; a silent one is left out."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """`acknowledged` serve `version`; `missing` says why each other one does not."""

    version: int
    seconds: float
    acknowledged: tuple[str, ...]
    missing: dict[str, str]


class LLMServerManager:
    """Invariant: updates do not overtake each other, so every server ends at the version of the last call."""

    def __init__(self, servers: Mapping[str, LLMServer]) -> None:
        self.servers: dict[str, LLMServer] = dict(servers)
        self._updating = asyncio.Lock()

    async def update_weights(self, info: WeightInfo, *, deadline: float = UPDATE_SECONDS) -> UpdateReport:
        """Give `info` to all servers at once; returns when each has acknowledged it, is dead, or `deadline` is over.

        Raises WeightError when a server refuses the weights (damaged, other names or shapes): the run's own mistake.
        """
        async with self._updating:
            now = asyncio.get_running_loop().time
            began = now()
            answers = await self._all(lambda server: server.update_weights(info.path, info.version), deadline)
            missing: dict[str, str] = {}
            for name, answer in answers.items():
                if isinstance(answer, WeightError) and not isinstance(answer, WeightsMissing):
                    raise answer
                if isinstance(answer, Exception):
                    missing[name] = str(answer)
            acknowledged = tuple(name for name in answers if name not in missing)
            return UpdateReport(info.version, now() - began, acknowledged, missing)

    async def loads(self) -> dict[str, ServerLoad]:
        """Of the servers that answer; one that is missing here is dead or starting."""
        answers = await self._all(lambda server: server.load(), LOAD_SECONDS)
        return {name: answer for name, answer in answers.items() if isinstance(answer, ServerLoad)}

    async def pause(self) -> None:
        """On all living servers: no decode step until `resume`."""
        await self._all(lambda server: server.pause(), UPDATE_SECONDS)

    async def resume(self) -> None:
        await self._all(lambda server: server.resume(), UPDATE_SECONDS)

    async def sleep(self) -> None:
        """On all living servers: no decode step until `wake_up`, and the memory of their caches is free meanwhile."""
        await self._all(lambda server: server.sleep(), UPDATE_SECONDS)

    async def wake_up(self) -> None:
        await self._all(lambda server: server.wake_up(), UPDATE_SECONDS)

    async def close(self) -> None:
        await self._all(lambda server: server.close(), UPDATE_SECONDS)

    async def _all(self, call: Callable[[LLMServer], Awaitable[Any]], seconds: float) -> dict[str, Any]:
        """By server: its answer, or the ServerDied, WeightError or TimeoutError in its place."""

        async def one(server: LLMServer) -> Any:
            try:
                async with asyncio.timeout(seconds):
                    return await call(server)
            except TimeoutError:
                return TimeoutError(f"no answer within {seconds:.0f} s; it catches up when it is back")
            except (ServerDied, WeightError) as error:
                return error

        return dict(zip(self.servers, await asyncio.gather(*map(one, self.servers.values())), strict=True))
