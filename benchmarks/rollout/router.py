"""The router and what stands around it: how fast, how even, how full, and what a death costs.

decisions   places given and given back per second, with 64 servers and 5,000 sessions
evenness    200 requests one after the other on 4 idle servers
slot use    64 simulated servers, log-normal lengths, and as many requests as slots on average (sessions have a pause
            between their turns): slots in use, over those of an oracle that knows all lengths and places (it never
            leaves a slot empty while a request waits anywhere); by 1, 4 and 8 agent workers of which the first has a
            third of the sessions, and which hear of each other once a second. Virtual clock
a batch     one that ends: its makespan over that of an oracle that begins with the longest, and over that of a single
            line before all slots of all servers, which knows no lengths either: the rest is the tail, not the routing
SIGKILL     of 1 of 3 servers (Ray actors): requests that failed; seconds until the others are as busy as they can be
storm       requests under aborts, pauses, syncs, kills, drains: tests/rollout/storm.py
"""

from __future__ import annotations

import asyncio
import heapq
import os
import signal
import time
from collections import deque
from collections.abc import Mapping
from itertools import count
from random import Random
from zlib import crc32

from agent_loop.llm.client import Patience, RoutedClient
from agent_loop.llm.fleet import FleetNews
from agent_loop.llm.protocol import LLMServer, SamplingParams
from agent_loop.llm.router import Router
from benchmarks.bars import Bar
from streamrl.rollout.fleet import Fleet
from streamrl.rollout.manager import LLMServerManager
from streamrl.rollout.sim.server import SimConfig, SimServer
from streamrl.rollout.sim.virtual_clock import run_virtual

SERVERS, SLOTS = 64, 8
STOP = 3
LENGTHS = SimConfig(token_seconds=0.02, response_tokens_mean=400, response_tokens_sigma=0.9, prefill_seconds=0.05)
BUDGET = 4000
SURVIVORS_TOKEN_SECONDS = 0.02


def router(storm_requests: int = 10_000) -> list[Bar]:
    bars = [decisions(), evenness()]
    for workers in (1, 4, 8):
        share = run_virtual(slot_use(workers))
        bars.append(Bar(f"slot use of {workers} workers over that of an oracle", share, "", 0.95, always=True))
    longest_first, blind = run_virtual(batch())
    bars.append(Bar("makespan of a batch over that of an oracle", longest_first, "x"))
    bars.append(Bar("the same over that of one line before all slots", blind, "x", 1.05, "at most", always=True))
    return [*bars, *asyncio.run(death()), *storm(storm_requests)]


def decisions(times: int = 1_000_000) -> Bar:
    """Of one core's own time, since others use this machine, too: a place given, and an older one given back."""
    routes = Router([f"server-{i}" for i in range(SERVERS)])
    held: deque = deque()
    sessions = [f"session-{i}" for i in range(5000)]
    began = time.process_time()
    for i in range(times):
        held.append(routes.acquire(sessions[i % 5000], 100 + i % 700))
        if len(held) > 2000:
            routes.release(held.popleft())
    return Bar("router: decisions", times / (time.process_time() - began), "/s", 200_000)


def evenness() -> Bar:
    routes = Router([f"server-{i}" for i in range(4)])
    chosen = dict.fromkeys(routes.servers, 0)
    for i in range(200):
        ticket = routes.acquire(f"s{i}", 100)
        assert ticket is not None
        chosen[ticket.server] += 1
        routes.release(ticket)
    spread = max(chosen.values()) - min(chosen.values())
    return Bar("router: 200 requests on 4 idle servers differ by", spread, "requests", 1, "at most", always=True)


class Agent:
    """One worker's client, in this process."""

    def __init__(self, name: str, servers: Mapping[str, LLMServer]) -> None:
        routes = Router(servers, offset=crc32(name.encode()))
        self.client = RoutedClient(servers, router=routes, patience=Patience(answer=1e6))

    async def hear(self, news: FleetNews) -> dict[str, tuple[int, int]]:
        return self.client.hear(news)


async def slot_use(workers: int, *, of: int = SERVERS, rounds: float = 5.0, pause: float = 1.6) -> float:
    """1.2 sessions per slot, each with a pause of `pause` seconds on average between its requests."""
    servers = {f"server-{i}": SimServer(LENGTHS, max_num_seqs=SLOTS, max_model_len=8192) for i in range(of)}
    agents = {f"agent-{i}": Agent(f"agent-{i}", servers) for i in range(workers)}
    beating = asyncio.ensure_future(Fleet(LLMServerManager(servers), lambda: agents).run())
    random, slots = Random(workers), of * SLOTS
    open_requests = 0

    async def session(number: int) -> None:
        nonlocal open_requests
        mine = 0 if number % 3 == 0 else number % workers
        for turn in count():
            await asyncio.sleep(random.expovariate(1 / pause))
            open_requests += 1
            # A new name each time: a session that is at home somewhere would say nothing of the router.
            asked = seeded(number * 100_000 + turn)
            await agents[f"agent-{mine}"].client.generate([1] * 10, asked, session=f"s{number}-{turn}")
            open_requests -= 1

    running = [asyncio.ensure_future(session(number)) for number in range(int(1.2 * slots))]
    mean = LENGTHS.response_tokens_mean * LENGTHS.token_seconds
    await asyncio.sleep(2 * mean)
    used = could = 0
    for _ in range(int(rounds * mean / 0.25)):
        await asyncio.sleep(0.25)
        used += sum([(await server.load()).running for server in servers.values()])
        could += min(slots, open_requests)
    for task in [*running, beating]:
        task.cancel()
    await asyncio.gather(*running, beating, return_exceptions=True)
    for agent in agents.values():
        await agent.client.close()
    return used / could


async def batch(rounds: int = 8) -> tuple[float, float]:
    """Requests for `rounds` of all slots at once, from 4 workers. Makespan over the oracle's, and the one line's."""
    servers = {f"server-{i}": SimServer(LENGTHS, max_num_seqs=SLOTS, max_model_len=8192) for i in range(SERVERS)}
    agents = {f"agent-{i}": Agent(f"agent-{i}", servers) for i in range(4)}
    fleet = Fleet(LLMServerManager(servers), lambda: agents)
    beating = asyncio.ensure_future(fleet.run())
    await asyncio.sleep(0.01)
    calls = [
        agents[f"agent-{i % 4}"].client.generate([1] * 10, seeded(i), session=f"s{i}")
        for i in range(rounds * SERVERS * SLOTS)
    ]
    results = await asyncio.gather(*calls)
    makespan = asyncio.get_running_loop().time()
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    for agent in agents.values():
        await agent.client.close()
    seconds = [result.engine_seconds for result in results]
    return makespan / listed(sorted(seconds, reverse=True)), makespan / listed(seconds)


def listed(seconds: list[float]) -> float:
    """The makespan if each, in this order, gets the slot that is free first."""
    slots = [0.0] * (SERVERS * SLOTS)
    for length in seconds:
        heapq.heapreplace(slots, slots[0] + length)
    return max(slots)


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(BUDGET, stop_token_ids=(STOP,), seed=seed)


async def tokens_made(servers: Mapping[str, LLMServer]) -> int:
    return sum([(await server.load()).tokens_generated for server in servers.values()])


async def death(slots: int = 32, sessions: int = 112, seconds: float = 20.0) -> list[Bar]:
    """`sessions` ask three servers for constant lengths without a pause; one of them is killed."""
    import ray

    from streamrl.rollout.replica import start_ray_servers
    from streamrl.rollout.server_config import RolloutServerConfig

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    sim = {"token_seconds": SURVIVORS_TOKEN_SECONDS, "response_tokens_mean": 150, "response_tokens_sigma": 0.5}
    config = RolloutServerConfig("sim", max_num_seqs=slots, max_model_len=2048, sim=sim)
    servers = await start_ray_servers({f"server-{i}": config for i in range(3)})
    agents = {f"agent-{i}": Agent(f"agent-{i}", servers) for i in range(2)}
    beating = asyncio.ensure_future(Fleet(LLMServerManager(servers), lambda: agents).run())
    failed: list[BaseException] = []

    async def session(number: int) -> None:
        client, turn = agents[f"agent-{number % 2}"].client, 0
        while True:
            try:
                await client.generate(
                    [1] * 10, SamplingParams(1000, stop_token_ids=(STOP,)), session=f"s{number}-{turn}"
                )
            except Exception as error:  # noqa: BLE001  # what this counts
                failed.append(error)
            turn += 1

    running = [asyncio.ensure_future(session(number)) for number in range(sessions)]
    try:
        await asyncio.sleep(6.0)
        os.kill(await servers["server-0"].pid(), signal.SIGKILL)
        killed = time.monotonic()
        survivors = {name: servers[name] for name in ("server-1", "server-2")}
        looks = [(time.monotonic(), await tokens_made(survivors))]
        while time.monotonic() < killed + seconds:
            await asyncio.sleep(1.0)
            looks.append((time.monotonic(), await tokens_made(survivors)))
    finally:
        for task in [*running, beating]:
            task.cancel()
        await asyncio.gather(*running, beating, return_exceptions=True)
        for agent in agents.values():
            await agent.client.close()
        await asyncio.gather(*(server.close() for server in servers.values()))
        ray.shutdown()
    capacity = 2 * slots / SURVIVORS_TOKEN_SECONDS
    after = [look for look in looks if look[0] >= killed + 5.0]
    rate = (after[-1][1] - after[0][1]) / (after[-1][0] - after[0][0]) / capacity
    return [
        Bar("SIGKILL of 1 of 3: requests that failed", len(failed), "requests", 0, "at most", always=True),
        Bar("SIGKILL of 1 of 3: throughput of the others from 5 s on, over their capacity", rate, "", 0.95),
    ]


def storm(requests: int) -> list[Bar]:
    from tests.rollout.storm import Outcome, Storm

    async def main() -> Outcome:
        return await Storm(seed=1, requests=requests).run()

    outcome = run_virtual(main())
    for line in outcome.wrong[:10]:
        print(line)
    happened = sum(outcome.happened.values())
    return [
        Bar("storm: requests", outcome.requests, "requests", requests, always=True),
        Bar("storm: things that happened to them", happened, ""),
        Bar("storm: tokens", outcome.tokens, "tokens"),
        Bar("storm: wrong versions, positions or budgets", len(outcome.wrong), "", 0, "at most", always=True),
        Bar("storm: stuck", sum(outcome.left.values()), "", 0, "at most", always=True),
    ]
