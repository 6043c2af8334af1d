"""A fleet of simulated servers on which everything happens at once: aborts, pauses, weight updates, deaths, drains,
servers that come and go, callers that give up; while an oracle in each engine writes the truth into the tokens.

Every token's id is its absolute position and the version that the oracle's own log says was in service when it was
made. So a token that was lost, repeated, moved, or stamped with another version than the one that sampled it shows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any
from zlib import crc32

from agent_loop.llm.client import Patience, PoisonRequest, RoutedClient
from agent_loop.llm.fleet import FleetNews
from agent_loop.llm.protocol import Generation, LLMServer, SamplingParams, ServerDied
from agent_loop.llm.router import Router
from streamrl.rollout.fleet import Fleet, FleetError
from streamrl.rollout.manager import LLMServerManager
from streamrl.rollout.sim.server import SimConfig, SimServer
from streamrl.weight_sync import WeightInfo

STOP = 7
VERSIONS = 1 << 20
SIM = SimConfig(
    vocab_size=1 << 44, token_seconds=0.05, token_sigma=0.3, response_tokens_mean=60, response_tokens_sigma=0.8,
    prefill_seconds=0.1, update_seconds=0.2,
)  # fmt: skip


class OracleServer(SimServer):
    """Its tokens say where they stand, and what the oracle says sampled them."""

    def __init__(self, published: list[int], name: str) -> None:
        self._published = published
        self._log: list[tuple[float, int]] = []
        self._lengths: dict[str, int] = {}
        super().__init__(SIM, max_num_seqs=16, max_model_len=4096, seed=crc32(name.encode()), server=name)

    def _start(self) -> None:
        """A server that comes back has the newest weights, as one with a store would."""
        super()._start()
        self._versions = [(float("-inf"), self._published[-1])]
        self._log = [(float("-inf"), self._published[-1])]

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams, images: Any = ()
    ) -> Generation:
        self._lengths[request_id] = len(prompt_ids)
        return await super().generate(request_id, prompt_ids, sampling, images)

    async def update_weights(self, path: str, version: int) -> None:
        await super().update_weights(path, version)
        self._log.append((self._time.now(), version))

    def _made(self, run: Any, first: int, count: int) -> Generation:
        got = super()._made(run, first, count)
        start = self._lengths[run.id]
        for place, moment in enumerate(run.times[first:count]):
            if got.token_ids[place] != STOP:
                version = [version for since, version in self._log if since < moment][-1]
                got.token_ids[place] = (start + first + place + 1) * VERSIONS + version
        return got


@dataclass
class Outcome:
    requests: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    left: dict[str, int] = field(default_factory=dict)
    """What was still held, waited for or running when all requests had ended: nothing should be."""


class Agent:
    def __init__(self, name: str, servers: dict[str, LLMServer]) -> None:
        router = Router(servers, offset=crc32(name.encode()))
        patience = Patience(healthy=600.0, poison=1000, deaths=1000)  # so many die here by chance
        self.client = RoutedClient(servers, patience=patience, router=router)

    async def hear(self, news: FleetNews) -> dict[str, tuple[int, int]]:
        return self.client.hear(news)


@dataclass
class Storm:
    """`every`: mean seconds between two disturbances. Raises TimeoutError when something is stuck."""

    seed: int
    requests: int
    agents: int = 3
    every: float = 0.3
    at_once: int = 100

    def __post_init__(self) -> None:
        self.random, self.outcome = Random(self.seed), Outcome()
        self.published = [0]
        self.servers: dict[str, OracleServer] = {}
        self.manager = LLMServerManager({f"server-{i}": self._make(f"server-{i}") for i in range(4)})
        self.listeners = {f"agent-{i}": Agent(f"agent-{i}", dict(self.manager.servers)) for i in range(self.agents)}
        self.fleet = Fleet(self.manager, lambda: self.listeners, start=self._start)

    def _make(self, name: str) -> OracleServer:
        self.servers[name] = server = OracleServer(self.published, name)
        return server

    async def _start(self, name: str) -> LLMServer:
        return self._make(name)

    async def run(self, *, seconds: float = 100_000.0) -> Outcome:
        async with asyncio.timeout(seconds):
            background = [asyncio.ensure_future(self.fleet.run()), asyncio.ensure_future(self._disturb())]
            room = asyncio.Semaphore(self.at_once)
            await asyncio.gather(*(self._request(number, room) for number in range(self.requests)))
            for task in background:
                task.cancel()
            for ended in await asyncio.gather(*background, return_exceptions=True):
                if not isinstance(ended, asyncio.CancelledError):
                    raise ended if isinstance(ended, BaseException) else RuntimeError("it ended early")
            await asyncio.sleep(15.0)  # aborts of requests given up are under way
        clients = [agent.client for agent in self.listeners.values()]
        running = [await s.load() for s in self.servers.values() if s._death is None]
        self.outcome.left = {
            "tickets": sum(client.router.in_flight() for client in clients),
            "in line": sum(client.waiting for client in clients),
            "in engines": sum(load.running + load.waiting for load in running),
        }
        for client in clients:
            await client.close()
        return self.outcome

    async def _request(self, number: int, room: asyncio.Semaphore) -> None:
        async with room:
            random = Random(self.seed * 1_000_003 + number)
            client = self.listeners[f"agent-{number % self.agents}"].client
            prompt, budget = [1] * random.randint(1, 50), random.choice([5, 40, 200, 400])
            sampling = SamplingParams(budget, stop_token_ids=(STOP,) if random.random() < 0.7 else ())
            so_far = Generation()
            call = asyncio.ensure_future(client.generate(prompt, sampling, session=f"s{number // 4}", so_far=so_far))
            if random.random() < 0.1:
                await asyncio.wait({call}, timeout=random.expovariate(0.5))
                call.cancel()
            try:
                await call
            except asyncio.CancelledError:
                self.outcome.happened["given up"] += 1
            except (ServerDied, PoisonRequest) as error:
                self.outcome.wrong.append(f"request {number} failed: {error!r}")
            else:
                self._check_end(number, so_far, sampling)
            self._check(number, len(prompt), so_far, sampling)

    def _check_end(self, number: int, got: Generation, sampling: SamplingParams) -> None:
        full = len(got.token_ids) == sampling.max_tokens
        stopped = bool(got.token_ids) and got.token_ids[-1] == STOP
        if got.stop_reason != ("stop" if stopped else "length") or not (full or stopped):
            self.outcome.wrong.append(f"request {number}: {got.stop_reason} with {len(got.token_ids)} tokens")

    def _check(self, number: int, start: int, got: Generation, sampling: SamplingParams) -> None:
        self.outcome.requests += 1
        self.outcome.tokens += len(got.token_ids)
        if not len(got.token_ids) == len(got.log_probs) == len(got.weight_versions) <= sampling.max_tokens:
            self.outcome.wrong.append(f"request {number}: lists differ, or more than {sampling.max_tokens} tokens")
        for place, (token, version) in enumerate(zip(got.token_ids, got.weight_versions, strict=False)):
            if token == STOP and place == len(got.token_ids) - 1:
                continue
            if divmod(token, VERSIONS) != (start + place + 1, version):
                told = divmod(token, VERSIONS)
                self.outcome.wrong.append(f"request {number}: token {place} stamped {version} is {told}")

    async def _disturb(self) -> None:
        """One thing after another; those that take long go on beside the next ones."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                await asyncio.sleep(self.random.expovariate(1 / self.every))
                what = self.random.choices(
                    ["sync", "abort", "abort all", "pause", "kill", "drain", "add"], [4, 4, 1, 2, 2, 1, 1]
                )[0]
                task = asyncio.ensure_future(self._do(what))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                for done in [t for t in tasks if t.done()]:
                    done.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for server in self.servers.values():  # so that what still runs can end
                server.restart()

    async def _do(self, what: str) -> None:
        random, name = self.random, self.random.choice(list(self.manager.servers))
        server = self.servers[name]
        self.outcome.happened[what] += 1
        try:
            match what:
                case "sync":
                    self.published.append(self.published[-1] + 1)
                    await self.manager.update_weights(WeightInfo(self.published[-1], "unused", 0), deadline=5.0)
                case "abort":
                    open_there = [*server._running, *server._waiting]
                    await server.abort(random.sample(open_there, min(5, len(open_there))))
                case "abort all":
                    await server.abort(None)
                case "pause":
                    await server.pause()
                    await asyncio.sleep(random.expovariate(1.0))
                    await server.resume()
                case "kill":
                    server.die()
                    await asyncio.sleep(random.expovariate(0.5))
                    server.restart()
                case "drain":
                    if len(self.manager.servers) > 2:
                        await self.fleet.remove(name, deadline=random.expovariate(0.5))
                case "add":
                    if len(self.manager.servers) < 6:
                        await self.fleet.add()
        except (ServerDied, FleetError):
            pass  # it was dead already, or the last one
