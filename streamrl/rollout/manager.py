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
    """Invariants: updates do not overtake each other, so every server ends at the version of the last call; a pinned
    server keeps the version it had until it is unpinned, or dies (it comes back with the newest)."""

    def __init__(self, servers: Mapping[str, LLMServer]) -> None:
        self.servers: dict[str, LLMServer] = dict(servers)
        self._updating = asyncio.Lock()
        self._pinned: dict[str, LLMServer] = {}
        self._missed: WeightInfo | None = None
        self._latest: WeightInfo | None = None

    async def update_weights(self, info: WeightInfo, *, deadline: float = UPDATE_SECONDS) -> UpdateReport:
        """Give `info` to all servers at once that are not pinned; returns when each has acknowledged it, is dead, or
        `deadline` is over.

        Raises WeightError when a server refuses the weights (damaged, other names or shapes): the run's own mistake.
        """
        async with self._updating:
            free = {name: server for name, server in self.servers.items() if name not in self._pinned}
            report = await self._update(info, deadline, free)
            report.missing.update(dict.fromkeys(self._pinned, "it is pinned, and gets the newest when it is unpinned"))
            self._missed = info if self._pinned else None
            self._latest = info
            return report

    async def add_server(self, name: str, server: LLMServer) -> None:
        """It gets every version from now on, and has the one in service on return; no update overtakes this. Raises
        what keeps it from loading that (WeightError, ServerDied, TimeoutError)."""
        async with self._updating, asyncio.timeout(UPDATE_SECONDS):
            load, info = await server.load(), self._latest
            if info is not None and load.weight_version != info.version:
                await server.update_weights(info.path, info.version)
            self.servers[name] = server

    def forget(self, name: str) -> LLMServer:
        """It gets no further version. The server, for the caller to close."""
        self._pinned.pop(name, None)
        return self.servers.pop(name)

    async def pin(self, count: int) -> list[str]:
        """So many servers, of those that are at the newest version the ones with the least to do, keep the version they
        have from now on; at least one stays unpinned. Their names; empty, and nothing is pinned, if too few answer."""
        async with self._updating:
            loads = await self.loads()
            newest = max((load.weight_version for load in loads.values()), default=0)
            fit = [name for name, load in loads.items() if load.weight_version == newest]
            if not 0 < count < len(self.servers) or count > len(fit):
                return []
            chosen = sorted(fit, key=lambda name: (loads[name].running + loads[name].waiting, name))[:count]
            self._pinned |= {name: self.servers[name] for name in chosen}
            await self._all(lambda server: _keep_weights(server, True), LOAD_SECONDS, self._pinned)
            return chosen

    async def unpin(self) -> None:
        """The pinned servers catch up. Raises WeightError, as `update_weights`."""
        async with self._updating:
            servers, self._pinned = self._pinned, {}
            await self._all(lambda server: _keep_weights(server, False), LOAD_SECONDS, servers)
            if (info := self._missed) is not None:
                self._missed = None
                await self._update(info, UPDATE_SECONDS, servers)

    async def _update(self, info: WeightInfo, deadline: float, servers: Mapping[str, LLMServer]) -> UpdateReport:
        now = asyncio.get_running_loop().time
        began = now()
        answers = await self._all(lambda server: server.update_weights(info.path, info.version), deadline, servers)
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

    async def _all(
        self,
        call: Callable[[LLMServer], Awaitable[Any]],
        seconds: float,
        servers: Mapping[str, LLMServer] | None = None,
    ) -> dict[str, Any]:
        """By server (None: of all): its answer, or the ServerDied, WeightError or TimeoutError in its place."""

        async def one(server: LLMServer) -> Any:
            try:
                async with asyncio.timeout(seconds):
                    return await call(server)
            except TimeoutError:
                return TimeoutError(f"no answer within {seconds:.0f} s; it catches up when it is back")
            except (ServerDied, WeightError) as error:
                return error

        asked = dict(self.servers if servers is None else servers)
        return dict(zip(asked, await asyncio.gather(*map(one, asked.values())), strict=True))


async def _keep_weights(server: LLMServer, keep: bool) -> None:
    """For those that look for newer weights by themselves."""
    if (told := getattr(server, "keep_weights", None)) is not None:
        await told(keep)
