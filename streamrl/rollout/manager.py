"""All LLM servers of a run as one: a new version goes to each of them, loads come from each of them.

    consumes  WeightInfo of a version that is complete (weight_sync)
    produces  UpdateReport: who serves it, who does not and why; LATEST, once they serve it
    waits for every server, in two phases (weight_sync/two_phase.py), each until the deadline

A dead server is not waited for: it loads LATEST when it comes back, before it serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from agent_loop.llm.answers import Sense, trouble
from agent_loop.llm.protocol import LLMServer, ServerDied, ServerLoad
from streamrl.rollout.together import broadcast, each_of
from streamrl.weight_sync import WeightError, WeightInfo, WeightsMissing
from streamrl.weight_sync.address import Epochs, is_broadcast
from streamrl.weight_sync.protocol import check_digest
from streamrl.weight_sync.shared_memory import publish
from streamrl.weight_sync.two_phase import SyncRound, TwoPhase, take

logger = logging.getLogger(__name__)
T = TypeVar("T")

UPDATE_SECONDS = 120.0
"""For one server to load a version; it includes the decode step or the prefill under way."""
BREAKS_OFF = 0.8
"""A broadcast ends by itself after this share of the time that it is waited for: so it is known who is silent."""
LOAD_SECONDS = 10.0
"""For one server to tell its load; a silent one is left out."""


@dataclass(frozen=True, slots=True)
class SyncPolicy:
    """How servers take a version."""

    order: Literal["together", "rolling"] = "together"
    """rolling: one after the other takes what all have loaded aside, so that never more than one stands still."""
    requests: Literal["keep", "abort"] = "keep"
    """abort: those that run end with the tokens they have, and their clients send them on with the new weights."""
    deadline: float = UPDATE_SECONDS
    """Seconds, of each phase; with `rolling` of each server."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """`acknowledged` serve `version`; `missing` says why each other one does not."""

    version: int
    seconds: float
    acknowledged: tuple[str, ...]
    missing: dict[str, str]
    in_service: bool = True
    """False: nobody could take it. All serve what they served, and it is not published."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds: "gather" and "transfer" (WeightInfo), "apply" until all had it aside, "commit" until they served it, and
    "pause", the longest in which one of them made no token for it."""
    checksums: dict[str, str] = field(default_factory=dict)
    """By server, of what it had aside; each that is in `acknowledged` is the trainer's."""


class LLMServerManager:
    """Invariants: updates do not overtake each other, so every server ends at the version of the last call; a pinned
    server keeps the version it had until it is unpinned, or dies (it comes back with the newest); a server that joins,
    or comes back, is asleep or awake as the others are, from the next beat on."""

    def __init__(self, servers: Mapping[str, LLMServer], policy: SyncPolicy | None = None) -> None:
        self.servers: dict[str, LLMServer] = dict(servers)
        self.behind: dict[str, str] = {}
        """Servers that answer and do not have the version in service, and why: nobody is to ask them for tokens."""
        self._policy = policy or SyncPolicy()
        self._epochs = Epochs()
        self._send: Callable[[str], Awaitable[Any]] | None = None
        self._catching_up: dict[str, asyncio.Task[None]] = {}
        self._updating = asyncio.Lock()
        self.asleep = False
        self.on_turn: Callable[[bool], None] = lambda asleep: None
        """Called with `asleep` before the servers fall asleep, and after they woke up."""
        self.on_missing: Callable[[], None] = lambda: None
        """Called when a version is in service that some server did not take."""
        self.service: Callable[[], Mapping[str, tuple[str, int]]] = dict
        """By server its status, and how often it was out of service; told by a fleet, if there is one."""
        self._turning = asyncio.Lock()
        """Held while servers fall asleep or wake up."""
        self._pinned: dict[str, LLMServer] = {}
        self._missed: WeightInfo | None = None
        self._latest: WeightInfo | None = None
        self.newest: int | None = None
        """The newest version that any server was given; None: none yet, and servers have what they started with."""
        self.on_newest: Callable[[int], None] = lambda version: None
        """Called with it before any server serves it."""
        self._sense = Sense()

    async def update_weights(self, info: WeightInfo, *, deadline: float | None = None) -> UpdateReport:
        """Give `info` to all servers that are not pinned, and publish it (LATEST) once each of them serves it, is dead,
        or is `behind`. Where nobody could take it nothing has changed, and the report says so. `deadline` (seconds, of
        each phase): None is the policy's.

        Raises WeightError when a server refuses the weights (damaged, other names or shapes) and no other takes them:
        the run's own mistake.
        """
        async with self._updating:
            self.newest = max(self.newest or 0, info.version)
            self._sense.tell_newest(self.newest)
            self.on_newest(self.newest)
            free = {name: server for name, server in self.servers.items() if name not in self._pinned}
            report = await self._update(info, deadline or self._policy.deadline, free)
            report.missing.update(dict.fromkeys(self._pinned, "it is pinned, and gets the newest when it is unpinned"))
            if report.in_service:
                self._missed = info if self._pinned else None
                self._latest = info  # before anybody can ask who is behind
                if report.missing:
                    self.on_missing()
                if info.staged:
                    await asyncio.to_thread(publish, info)
            return report

    def broadcast_by(self, send: Callable[[str], Awaitable[Any]]) -> None:
        """How the ranks are told to broadcast (ActorWorker.send_weights): for versions that are no files."""
        self._send = send

    async def load_of(self, name: str) -> ServerLoad:
        """Raises ServerDied, also of a server that has not the version in service (it failed to take it, or came back
        without): it is given that meanwhile."""
        load, latest = await self._turned(name, await self._load(name)), self._latest
        if latest is None or name in self._pinned:
            return load
        if load.weight_version == latest.version:
            self.behind.pop(name, None)
            return load
        if self._updating.locked() and name not in self.behind:
            return load
        why = self.behind.setdefault(name, "it came back without")
        if name not in self._catching_up:
            task = self._catching_up[name] = asyncio.ensure_future(self._catch_up(name))
            task.add_done_callback(lambda _: self._catching_up.pop(name, None))
        raise ServerDied(f"{name} serves version {load.weight_version}, not {latest.version}: {why}")

    async def _load(self, name: str) -> ServerLoad:
        load = await self.servers[name].load()
        self._sense.check_load(load, name)
        return load

    async def _turned(self, name: str, load: ServerLoad) -> ServerLoad:
        """A server that was started anew meanwhile falls asleep as all others, or wakes up."""
        if load.asleep == self.asleep or self._turning.locked():  # then all are told, and it is among them
            return load
        async with self._turning:
            await self._turn(self.servers[name])
            return await self._load(name)

    async def _turn(self, server: LLMServer) -> None:
        async with asyncio.timeout(LOAD_SECONDS):
            await (server.sleep() if self.asleep else server.wake_up())

    async def _catch_up(self, name: str) -> None:
        async with self._updating:
            info, server = self._latest, self.servers.get(name)
            if info is None or server is None or name not in self.behind:
                return
            try:
                await self._give(name, server, info)
            except Exception as error:  # noqa: BLE001  # a server of one's own may raise anything
                own = isinstance(error, (WeightError, TimeoutError))
                self.behind[name] = str(error if own else trouble(error, name, "a weight update"))
                logger.warning("%s still serves older weights: %s", name, self.behind[name])

    async def _give(self, name: str, server: LLMServer, info: WeightInfo) -> None:
        """A version to one server. Raises what keeps it from taking it (WeightError, ServerDied, TimeoutError)."""
        if not is_broadcast(info.path):
            async with asyncio.timeout(self._policy.deadline):
                await _answered(take(server, info))
            return
        paths, answers = await self._prepare(info, self._policy.deadline, {name: server})
        if isinstance(answer := answers[name], Exception):
            raise answer
        check_digest(answer, info)
        await self._commit(server, paths[name], info.version)

    async def add_server(self, name: str, server: LLMServer) -> None:
        """It gets every version from now on, and has the one in service on return; no update overtakes this. Raises
        what keeps it from loading that (WeightError, ServerDied, TimeoutError)."""
        async with self._updating, asyncio.timeout(LOAD_SECONDS + 2 * self._policy.deadline):  # two phases
            load, info = await server.load(), self._latest
            self._sense.check_load(load, name)
            if info is not None and load.weight_version != info.version:
                await self._give(name, server, info)
            async with self._turning:
                if self.asleep:
                    await self._turn(server)
                self.servers[name] = server

    def forget(self, name: str) -> LLMServer:
        """It gets no further version. The server, for the caller to close."""
        self._pinned.pop(name, None)
        self.behind.pop(name, None)
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
                await self._update(info, self._policy.deadline, servers)

    async def _update(self, info: WeightInfo, deadline: float, servers: Mapping[str, LLMServer]) -> UpdateReport:
        now = asyncio.get_running_loop().time
        began, turn = now(), SyncRound(info.digest)
        paths, answers = await self._prepare(info, deadline, servers)
        ready = turn.prepared(answers)
        prepared, pauses = now(), [0.0]
        for part in [[name] for name in ready] if self._policy.order == "rolling" else [ready]:
            calls = {name: partial(self._commit, servers[name], paths[name], info.version) for name in part}
            answers = await each_of(calls, deadline)
            turn.committed(answers)
            pauses += [answer for answer in answers.values() if isinstance(answer, float)]
        if turn.refusal is not None:
            raise turn.refusal
        for name in turn.acknowledged:
            self.behind.pop(name, None)
        if turn.in_service:
            self.behind |= turn.behind
        stages = {**info.stages, "apply": prepared - began, "commit": now() - prepared, "pause": max(pauses)}
        return UpdateReport(
            info.version, now() - began, turn.acknowledged, dict(turn.missing), turn.in_service, stages,
            dict(turn.checksums),
        )  # fmt: skip

    async def _prepare(
        self, info: WeightInfo, deadline: float, servers: Mapping[str, LLMServer]
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """Under which path each server has the version aside, and what it answered. Of a broadcast that breaks off,
        those that are still there get a second one."""
        if not is_broadcast(info.path):
            return dict.fromkeys(servers, info.path), await each_of(_preparing(servers, info), deadline)
        if self._send is None:
            raise WeightsMissing("no training ranks to broadcast these weights: broadcast_by() was not called")
        loads = await self._all(lambda server: server.load(), LOAD_SECONDS, servers)
        answers = {name: load for name, load in loads.items() if isinstance(load, Exception)}  # they would hold up all
        left, paths = {name: servers[name] for name in servers if name not in answers}, dict[str, str]()
        for _ in range(2 if left else 0):
            members = [getattr(server, "identity", server) for server in left.values()]
            order, addresses = self._epochs.addresses(info.path, members, BREAKS_OFF * deadline / 2)
            paths |= dict(zip(left, addresses, strict=True))
            calls = {name: partial(_prepare, left[name], paths[name], info.version) for name in left}
            found, sent = await broadcast(partial(self._send, order), calls, deadline / 2)
            answers |= found
            if sent:
                break
            self._epochs.broken()
            left = {name: left[name] for name, answer in found.items() if isinstance(answer, WeightsMissing)}
            if not left:
                break
        return paths, answers

    async def _commit(self, server: LLMServer, path: str, version: int) -> float | None:
        if self._policy.requests == "abort":
            await server.abort(None)
        if isinstance(server, TwoPhase):
            return await _answered(server.commit_weights(path, version))
        await _answered(server.update_weights(path, version))
        return None

    async def loads(self) -> dict[str, ServerLoad]:
        """Of the servers that answer; one that is missing here is dead or starting."""
        answers = await each_of({name: partial(self._load, name) for name in self.servers}, LOAD_SECONDS)
        return {name: answer for name, answer in answers.items() if isinstance(answer, ServerLoad)}

    async def pause(self) -> None:
        """On all living servers: no decode step until `resume`."""
        await self._all(lambda server: server.pause(), UPDATE_SECONDS)

    async def resume(self) -> None:
        await self._all(lambda server: server.resume(), UPDATE_SECONDS)

    async def sleep(self) -> None:
        """All living servers: no decode step until `wake_up`, and the memory of their caches is free meanwhile."""
        async with self._turning:
            self.asleep = True
            self.on_turn(True)
            await self._all(lambda server: server.sleep(), UPDATE_SECONDS)

    async def wake_up(self) -> None:
        async with self._turning:
            self.asleep = False
            await self._all(lambda server: server.wake_up(), UPDATE_SECONDS)
            self.on_turn(False)

    async def close(self) -> None:
        await self._all(lambda server: server.close(), UPDATE_SECONDS)

    async def _all(
        self,
        call: Callable[[LLMServer], Awaitable[Any]],
        seconds: float,
        servers: Mapping[str, LLMServer] | None = None,
    ) -> dict[str, Any]:
        """By server (None: of all): its answer, or the ServerDied, WeightError or TimeoutError in its place."""

        asked = self.servers if servers is None else servers
        return await each_of({name: partial(call, server) for name, server in asked.items()}, seconds)


def _preparing(servers: Mapping[str, LLMServer], info: WeightInfo) -> dict[str, Callable[[], Awaitable[Any]]]:
    return {name: partial(_prepare, server, info.path, info.version) for name, server in servers.items()}


async def _prepare(server: LLMServer, path: str, version: int) -> str | None:
    return await _answered(server.prepare_weights(path, version)) if isinstance(server, TwoPhase) else None


async def _answered(call: Awaitable[T]) -> T:
    """What a server of one's own raises is no end of the run, but its refusal: the others may take the version."""
    try:
        return await call
    except (WeightError, ServerDied, TimeoutError):
        raise
    except Exception as error:
        raise WeightError(f"it broke at these weights: {error!r}") from error


async def _keep_weights(server: LLMServer, keep: bool) -> None:
    """For those that look for newer weights by themselves."""
    if (told := getattr(server, "keep_weights", None)) is not None:
        await told(keep)
