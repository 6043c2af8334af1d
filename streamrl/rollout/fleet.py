"""The LLM servers of a run while it runs: who serves, how busy they are, who comes and who goes.

consumes  the load of every server, the places that every agent worker holds there    once a beat
produces  `FleetNews` for every agent worker: health, limits, drains, what the others hold; new handles
waits for a server that joins (weights), a server that is drained (its requests), each with a deadline

    joins:   started ─► has the weights in service ─► known to the manager (next versions) ─► told to the workers
    leaves:  drained (no new requests) ─► empty, or its requests moved ─► unknown to workers and manager ─► closed

The workers' routers decide alone between two beats (agent_loop/llm/router.py says why).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from agent_loop.llm.answers import trouble
from agent_loop.llm.fleet import FleetNews
from agent_loop.llm.protocol import LLMServer, ServerLoad
from agent_loop.llm.router import ServerNews
from streamrl.rollout.limits import InFlightLimit
from streamrl.rollout.manager import LLMServerManager

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
ANSWER_SECONDS = 1.0
"""A beat waits so long for loads and workers; who answers later counts in the next one."""
SILENT_SECONDS = 60.0
"""A server that has told no load for so long is taken out. Loading large weights may hold up an answer; one that hangs
with requests is found sooner, by their own heartbeats (agent_loop/llm/beats.py)."""
DRAIN_SECONDS = 60.0
"""For the requests of a drained server to end; then they are moved, with their tokens."""
MOVE_SECONDS = 30.0
"""For moved requests to leave."""

Held = dict[str, tuple[int, int]]


class FleetError(ValueError):
    """What was asked of the fleet cannot be; the message says why."""


class Worker(Protocol):
    """An agent worker (agent_loop.manager.WorkerHandle), as far as servers concern it."""

    async def hear(self, news: FleetNews) -> Held:
        """By server: requests and tokens that it has in flight there."""
        ...


@dataclass(slots=True)
class _Member:
    limit: InFlightLimit = field(default_factory=InFlightLimit)
    load: ServerLoad | None = None
    out: str = ""
    """Why it is out of service, if it is."""
    draining: bool = False
    asked: float = 0.0
    asking: asyncio.Task[ServerLoad] | None = None
    told_out: bool = False
    """Whether what was told last is that it is out."""
    outages: int = 0

    @property
    def status(self) -> str:
        if self.out:
            return "out"
        if self.draining:
            return "draining"
        return "unknown" if self.load is None else "asleep" if self.load.asleep else "serving"


@dataclass(frozen=True, slots=True)
class Row:
    """One server, for people."""

    name: str
    status: str
    version: int | None
    requests: int
    limit: int | None
    slots: int | None
    reason: str = ""


class Fleet:
    """Invariants: a server that joined has the weights in service before any worker knows it; one that left serves
    nobody when it is closed; the last server in service is not drained. What is asked is decided at once, and changes
    of several servers go on at the same time."""

    def __init__(
        self,
        manager: LLMServerManager,
        workers: Callable[[], Mapping[str, Worker]],
        *,
        start: Callable[[str], Awaitable[LLMServer]] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """`start(name)` makes one more server of the run's kind, None: this run cannot. `max_tokens`: in flight at one
        server, prompts and budgets."""
        self._manager, self._workers, self._start, self._max_tokens = manager, workers, start, max_tokens
        self._members: dict[str, _Member] = {name: _Member() for name in manager.servers}
        self._held: dict[str, Held] = {}
        self._told: dict[str, int] = {}
        self._changes = 0
        self._joining: set[str] = set()
        """Names of servers that are being started, or load the weights in service."""
        self._soon = asyncio.Event()
        manager.on_missing, manager.service = self._soon.set, self.service
        self.on_service: Callable[[str, str], None] = lambda server, what: None
        """Called when a server goes out of service, with why, and when it is back."""
        self._beating = asyncio.Lock()

    async def run(self) -> None:
        """Beat until cancelled: every second, and at once when a server did not take the version in service."""
        try:
            while True:
                await self.beat()
                with suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_SECONDS):
                        await self._soon.wait()
                self._soon.clear()
        finally:
            for member in self._members.values():
                if member.asking is not None:
                    member.asking.cancel()

    async def beat(self) -> None:
        """Ask every server, tell every worker."""
        async with self._beating:
            await self._look()
            self._tell_service()
            workers = dict(self._workers())
            self._held = {name: held for name, held in self._held.items() if name in workers}
            self._told = {name: told for name, told in self._told.items() if name in workers}
            await asyncio.gather(*(self._tell(name, worker, len(workers)) for name, worker in workers.items()))

    def service(self) -> dict[str, tuple[str, int]]:
        """By server: its status, and how often it was out of service. From any thread."""
        return {name: (member.status, member.outages) for name, member in list(self._members.items())}

    def _tell_service(self) -> None:
        for name, member in self._members.items():
            if bool(member.out) == member.told_out:
                continue
            member.told_out = bool(member.out)
            member.outages += member.told_out
            version = "" if member.load is None else f" with version {member.load.weight_version}"
            why = member.out.removeprefix("health check: ")
            what = f"{name} is out of service: {why}" if member.out else f"{name} is back in service{version}"
            logger.warning("%s", what)
            self.on_service(name, what)

    def rows(self) -> list[Row]:
        """All servers, as of the last beat."""
        found: list[Row] = []
        for name, member in sorted(self._members.items()):
            load, status = member.load, member.status
            version, slots = (load.weight_version, load.slots) if load else (None, None)
            found.append(Row(name, status, version, self._requests(name), member.limit.requests, slots, member.out))
        return found

    async def add(self, name: str | None = None) -> str:
        """Start one more server; its name. Returns once it serves. Raises FleetError, or what kept it from starting."""
        if self._start is None:
            raise FleetError("this run cannot start further servers")
        if name is None:
            taken = {*self._members, *self._joining}
            name = next(f"server-{i}" for i in range(len(taken) + 1) if f"server-{i}" not in taken)
        with self._named(name):
            await self._join(name, await self._start(name))
        return name

    async def add_server(self, name: str, server: LLMServer) -> None:
        """`server` joins. Raises FleetError, or what kept it from loading the weights in service; then it is closed."""
        with self._named(name):
            await self._join(name, server)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Nobody else joins under this name meanwhile."""
        if name in self._members:
            raise FleetError(f"there is a server {name} already")
        if name in self._joining:
            raise FleetError(f"a server {name} is being started already")
        self._joining.add(name)
        try:
            yield
        finally:
            self._joining.discard(name)

    async def drain(self, name: str, *, deadline: float = DRAIN_SECONDS) -> None:
        """Returns when none of its requests is left. Those that have not ended after `deadline` seconds go on
        elsewhere, with the tokens they have. Raises FleetError."""
        await self._drain(name, deadline)

    async def undrain(self, name: str) -> None:
        """It gets requests again, from now on; a drain or a removal of it that is under way is broken off. Raises
        FleetError."""
        self._member(name).draining = False
        await self.beat()

    async def remove(self, name: str, *, deadline: float = DRAIN_SECONDS) -> None:
        """Drain it, forget it, end its process. Raises FleetError."""
        member = self._member(name)
        await self._drain(name, deadline)
        if self._members.get(name) is not member:
            raise FleetError(f"{name} was removed meanwhile")
        server = self._manager.forget(name)
        del self._members[name]
        if member.asking is not None:
            member.asking.cancel()
        self._changes += 1
        await self.beat()
        await server.close()
        logger.info("LLM server %s has left", name)

    async def _join(self, name: str, server: LLMServer) -> None:
        try:
            await self._manager.add_server(name, server)
        except BaseException:
            await server.close()
            raise
        self._members[name] = _Member()
        self._changes += 1
        await self.beat()
        logger.info("LLM server %s has joined", name)

    async def _drain(self, name: str, deadline: float) -> None:
        member = self._member(name)
        others = [n for n, m in self._members.items() if n != name and not m.out and not m.draining]
        if not others:
            if member.out:
                raise FleetError(f"no server is in service, {name} neither ({member.out}): add another one first")
            raise FleetError(f"{name} is the last server in service: add another one first")
        member.draining = True
        clock = asyncio.get_running_loop().time
        moves_at = clock() + deadline
        ends_at = moves_at + MOVE_SECONDS
        await self.beat()
        while left := self._requests(name):
            if not member.draining:
                raise FleetError(f"{name} was undrained meanwhile, and keeps the {left} requests it has")
            if clock() >= ends_at:
                raise FleetError(f"{left} requests of {name} neither ended nor could be moved; it stays drained")
            if clock() >= moves_at:
                await self._move(name)
            await asyncio.sleep(min(BEAT_SECONDS, max(0.05, moves_at - clock())))
            await self.beat()
        if not member.draining:
            raise FleetError(f"{name} was undrained meanwhile")

    def _member(self, name: str) -> _Member:
        if (member := self._members.get(name)) is None:
            raise FleetError(f"there is no server {name}; there are {', '.join(sorted(self._members))}")
        return member

    async def _move(self, name: str) -> None:
        """Ends its requests with the tokens they have; their clients continue elsewhere."""
        try:
            async with asyncio.timeout(MOVE_SECONDS):
                await self._manager.servers[name].abort(None)
        except Exception as error:  # noqa: BLE001  # then they continue because it is dead, or end by themselves
            logger.warning("requests of %s could not be aborted: %r", name, error)

    def _requests(self, name: str) -> int:
        return sum(held.get(name, (0, 0))[0] for held in self._held.values())

    async def _look(self) -> None:
        """Each server's load. One that hangs holds up nothing: its question stays open over several beats."""
        now = asyncio.get_running_loop().time()
        for name, member in self._members.items():
            if member.asking is None:
                member.asked = now
                member.asking = asyncio.ensure_future(self._manager.load_of(name))
        asked = {m.asking for m in self._members.values() if m.asking is not None}
        if asked:
            await asyncio.wait(asked, timeout=ANSWER_SECONDS)
        for name, member in self._members.items():
            task = member.asking
            if task is None or not task.done():
                silent = now - member.asked
                if silent > SILENT_SECONDS:
                    member.out = f"it has told no load for {silent:.0f} s"
                continue
            member.asking = None
            try:
                member.load, member.out = task.result(), ""
                member.limit.update(member.load)
            except (ConnectionError, TimeoutError, asyncio.CancelledError) as error:
                member.out = f"health check: {str(error) or type(error).__name__}"
            except Exception as error:  # noqa: BLE001  # one that answers oddly must not end the beats of all
                member.out = f"health check: {trouble(error, name, 'load')}"

    async def _tell(self, name: str, worker: Worker, routers: int) -> None:
        own, changes = self._held.get(name, {}), self._changes
        news = FleetNews(
            routers=routers,
            servers={s: self._news(s, m, own) for s, m in self._members.items() if m.load and not m.out},
            out={s: m.out for s, m in self._members.items() if m.out},
            draining=frozenset(s for s, m in self._members.items() if m.draining),
            newest=self._manager.newest,
            asleep=self._manager.asleep,
            handles=dict(self._manager.servers) if self._told.get(name) != changes else None,
        )
        try:
            async with asyncio.timeout(ANSWER_SECONDS * 10):
                self._held[name] = await worker.hear(news)
            self._told[name] = changes
        except Exception as error:  # noqa: BLE001  # it dies of that elsewhere, or hears the next beat
            logger.info("agent worker %s did not hear of the LLM servers: %r", name, error)

    def _news(self, server: str, member: _Member, own: Held) -> ServerNews:
        assert member.load is not None
        requests, tokens = own.get(server, (0, 0))
        all_tokens = sum(held.get(server, (0, 0))[1] for held in self._held.values())
        return ServerNews(
            version=member.load.weight_version,
            max_requests=member.limit.requests,
            max_tokens=self._max_tokens,
            others_requests=self._requests(server) - requests,
            others_tokens=all_tokens - tokens,
            told_requests=requests,
            told_tokens=tokens,
        )
