"""Servers come, go and hang while several agent workers use them; simulated servers on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from agent_loop.llm.client import Patience, RoutedClient
from agent_loop.llm.fleet import FleetNews
from agent_loop.llm.protocol import Generation, LLMServer, SamplingParams, ServerDied, ServerLoad
from benchmarks.rollout.router import slot_use
from streamrl.rollout.fleet import SILENT_SECONDS, Fleet, FleetError
from streamrl.rollout.manager import LLMServerManager, SyncPolicy
from streamrl.rollout.sim.server import SimConfig, SimServer
from streamrl.rollout.sim.virtual_clock import run_virtual
from streamrl.weight_sync import WeightInfo

PROMPT = [1, 2, 3]
SIM = SimConfig(token_seconds=0.1)


class InProcess:
    """A worker's side of the fleet, with nothing around its client."""

    def __init__(self, servers: dict[str, LLMServer], offset: int) -> None:
        self.client = RoutedClient(servers, patience=Patience(healthy=30.0))
        self.news: list[FleetNews] = []
        self.deaf = False

    async def hear(self, news: FleetNews) -> dict[str, tuple[int, int]]:
        if self.deaf:
            raise ServerDied("the worker is gone")
        self.news.append(news)
        return self.client.hear(news)


@dataclass
class World:
    count: int = 2
    workers: int = 2
    slots: int = 4
    deadline: float = 120.0
    phases: int = 2
    servers: dict[str, Any] = field(default_factory=dict)
    made: int = 0

    def __post_init__(self) -> None:
        self.servers = {f"server-{i}": self.server() for i in range(self.count)}
        seen: dict[str, Any] = {
            name: server if self.phases == 2 else OnePhase(server) for name, server in self.servers.items()
        }
        self.manager = LLMServerManager(seen, SyncPolicy(deadline=self.deadline))
        self.listeners = {f"agent-{i}": InProcess(seen, i) for i in range(self.workers)}
        self.fleet = Fleet(self.manager, lambda: self.listeners, start=self.start)

    def server(self) -> SimServer:
        return SimServer(SIM, max_num_seqs=self.slots, max_model_len=4096)

    async def start(self, name: str) -> LLMServer:
        self.servers[name] = server = self.server()
        return server

    def generate(self, worker: int, tokens: int, session: str) -> asyncio.Task[Generation]:
        client = self.listeners[f"agent-{worker}"].client
        return asyncio.ensure_future(client.generate(PROMPT, SamplingParams(tokens), session=session))

    async def close(self) -> None:
        for listener in self.listeners.values():
            await listener.client.close()

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        async def main() -> None:
            beating = asyncio.create_task(self.fleet.run())
            await asyncio.sleep(0.01)
            await asyncio.wait_for(test, 10_000)
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await self.close()

        run_virtual(main())


def test_a_server_that_joins_has_the_weights_in_service_before_its_first_request() -> None:
    world = World()

    async def test() -> None:
        await world.manager.update_weights(WeightInfo(version=7, path="unused", bytes=0))
        assert await world.fleet.add() == "server-2"
        assert (await world.servers["server-2"].load()).weight_version == 7
        await asyncio.sleep(1)
        calls = [world.generate(i % 2, 50, f"s{i}") for i in range(12)]
        await asyncio.sleep(3)
        assert (await world.servers["server-2"].load()).running >= 2
        await world.manager.update_weights(WeightInfo(version=8, path="unused", bytes=0))
        assert (await world.servers["server-2"].load()).weight_version == 8
        assert {got.stop_reason for got in await asyncio.gather(*calls)} == {"length"}

    world.run(test())


def test_a_server_that_cannot_load_the_weights_does_not_join() -> None:
    world = World()

    class Refuses(SimServer):
        async def update_weights(self, path: str, version: int) -> None:
            raise ServerDied("no memory")

    async def test() -> None:
        await world.manager.update_weights(WeightInfo(version=7, path="unused", bytes=0))
        refuses = Refuses(SIM)
        with pytest.raises(ServerDied, match="no memory"):
            await world.fleet.add_server("new", refuses)
        assert "new" not in world.manager.servers
        assert [row.name for row in world.fleet.rows()] == ["server-0", "server-1"]
        with pytest.raises(ServerDied):
            await refuses.load()

    world.run(test())


def test_a_drained_server_ends_what_it_has_and_gets_nothing_new() -> None:
    world = World()

    async def test() -> None:
        calls = [world.generate(i % 2, 100, f"s{i}") for i in range(4)]
        await asyncio.sleep(2)
        await world.fleet.drain("server-0", deadline=60.0)
        assert (await world.servers["server-0"].load()).running == 0
        later = [world.generate(i % 2, 20, f"t{i}") for i in range(4)]
        await asyncio.sleep(1)
        assert (await world.servers["server-0"].load()).tokens_generated == 200
        assert all(len(got.token_ids) == 100 for got in await asyncio.gather(*calls))
        await asyncio.gather(*later)
        assert [(row.name, row.status) for row in world.fleet.rows()] == [
            ("server-0", "draining"), ("server-1", "serving"),
        ]  # fmt: skip

    world.run(test())


def test_what_has_not_ended_by_the_deadline_of_a_drain_goes_on_elsewhere_with_its_tokens() -> None:
    world = World()

    async def test() -> None:
        calls = [world.generate(i % 2, 1000, f"s{i}") for i in range(4)]
        await asyncio.sleep(2)
        await world.fleet.remove("server-0", deadline=5.0)
        assert asyncio.get_running_loop().time() < 12.0
        assert list(world.manager.servers) == ["server-1"]
        assert all(list(listener.client.router.servers) == ["server-1"] for listener in world.listeners.values())
        results = await asyncio.gather(*calls)
        assert all(len(got.token_ids) == 1000 for got in results)
        made = (await world.servers["server-1"].load()).tokens_generated
        assert 3500 < made < 4000, "tokens of the removed server were kept"
        with pytest.raises(ServerDied):
            await world.servers["server-0"].load()

    world.run(test())


def test_a_drained_server_that_is_undrained_gets_requests_again() -> None:
    world = World()

    async def test() -> None:
        await world.fleet.drain("server-0")
        await world.generate(0, 10, "while drained")
        assert (await world.servers["server-0"].load()).tokens_generated == 0
        await world.fleet.undrain("server-0")
        calls = [world.generate(i % 2, 20, f"s{i}") for i in range(8)]
        await asyncio.sleep(1)
        assert (await world.servers["server-0"].load()).running == 4
        await asyncio.gather(*calls)
        assert {row.status for row in world.fleet.rows()} == {"serving"}
        await world.fleet.undrain("server-0")
        with pytest.raises(FleetError, match="no server server-7; there are server-0, server-1"):
            await world.fleet.undrain("server-7")

    world.run(test())


def test_a_removal_under_way_is_broken_off_by_undrain_and_its_requests_stay() -> None:
    world = World()

    async def test() -> None:
        calls = [world.generate(i % 2, 200, f"s{i}") for i in range(4)]
        await asyncio.sleep(2)
        removal = asyncio.ensure_future(world.fleet.remove("server-0", deadline=60.0))
        await asyncio.sleep(2)
        await world.fleet.undrain("server-0")
        with pytest.raises(FleetError, match="server-0 was undrained meanwhile, and keeps the 2 requests it has"):
            await removal
        assert sorted(world.manager.servers) == ["server-0", "server-1"]
        await asyncio.gather(*calls)
        assert (await world.servers["server-0"].load()).tokens_generated == 400

    world.run(test())


def test_a_dead_server_is_not_in_service_for_being_undrained() -> None:
    world = World()

    async def test() -> None:
        await world.fleet.drain("server-0")
        world.servers["server-0"].die()
        await asyncio.sleep(2.5)
        await world.fleet.undrain("server-0")
        assert all("server-0" in listener.client.router.out() for listener in world.listeners.values())
        world.servers["server-0"].restart()
        await asyncio.sleep(8)
        assert {row.status for row in world.fleet.rows()} == {"serving"}
        assert not any(listener.client.router.out() for listener in world.listeners.values())

    world.run(test())


class OnePhase:
    """An `LLMServer` that loads everything at its update: what a server of one's own may be."""

    def __init__(self, whole: SimServer) -> None:
        self.whole = whole

    def __getattr__(self, verb: str) -> Any:
        if verb in ("prepare_weights", "commit_weights"):
            raise AttributeError(verb)
        return getattr(self.whole, verb)


@pytest.mark.parametrize("phases", [1, 2])
@pytest.mark.parametrize("how", ["refuse", "hang", "break"])
def test_a_server_whose_weight_sync_fails_serves_nobody_at_once_and_is_back_with_the_version(
    how: Literal["refuse", "hang", "break"], phases: int
) -> None:
    world = World(deadline=20.0, phases=phases)
    failing = world.servers["server-0"]
    failing.fail_updates(how, "commit")

    async def old_tokens(since: str) -> int:
        calls = [world.generate(i % 2, 10, f"{since} {i}") for i in range(8)]
        return sum(version < 7 for got in await asyncio.gather(*calls) for version in got.weight_versions)

    async def test() -> None:
        await asyncio.sleep(2)
        report = await world.manager.update_weights(WeightInfo(version=7, path="unused", bytes=0))
        assert (report.acknowledged, set(report.missing)) == (("server-1",), {"server-0"})
        await asyncio.sleep(0.01)
        for second in range(30):
            assert await old_tokens(f"after {second}") == 0
            assert [row.status for row in world.fleet.rows()] == ["out", "serving"]
            await asyncio.sleep(1)
        assert (await failing.load()).weight_version == 0
        failing.fail_updates(None)
        await asyncio.sleep(30)
        assert [row.status for row in world.fleet.rows()] == ["serving", "serving"]
        assert await old_tokens("later") == 0
        assert (await failing.load()).tokens_generated > 0

    world.run(test())


def test_a_drain_does_not_wait_for_a_server_that_starts_and_servers_start_together() -> None:
    world = World()

    async def test() -> None:
        at_once = world.start

        async def slowly(name: str) -> LLMServer:
            await asyncio.sleep(120)
            return await at_once(name)

        world.fleet._start = slowly
        clock = asyncio.get_running_loop().time
        began = clock()
        adding = [asyncio.ensure_future(world.fleet.add()) for _ in range(2)]
        await asyncio.sleep(1)
        with pytest.raises(FleetError, match="a server server-2 is being started already"):
            await world.fleet.add("server-2")
        await world.fleet.remove("server-0", deadline=10)
        assert clock() - began < 10
        assert await asyncio.gather(*adding) == ["server-2", "server-3"]
        assert clock() - began < 130
        assert sorted(world.manager.servers) == ["server-1", "server-2", "server-3"]

    world.run(test())


def test_two_drains_at_the_same_time_leave_one_server_in_service() -> None:
    world = World()

    async def test() -> None:
        told = await asyncio.gather(
            world.fleet.remove("server-0"), world.fleet.remove("server-1"), return_exceptions=True
        )
        assert [type(answer) for answer in told] == [type(None), FleetError]
        assert list(world.manager.servers) == ["server-1"]

    world.run(test())


def test_a_removal_that_another_one_has_done_says_so() -> None:
    world = World()

    async def test() -> None:
        told = await asyncio.gather(*(world.fleet.remove("server-0") for _ in range(2)), return_exceptions=True)
        assert [str(answer) for answer in told if answer] == ["server-0 was removed meanwhile"]

    world.run(test())


def test_where_no_server_is_in_service_the_one_to_be_drained_is_not_called_the_last_one() -> None:
    world = World()

    async def test() -> None:
        for server in world.servers.values():
            await server.close()
        await asyncio.sleep(3)
        with pytest.raises(FleetError, match="no server is in service, server-0 neither .*closed"):
            await world.fleet.drain("server-0")

    world.run(test())


def test_the_last_server_in_service_is_not_drained() -> None:
    world = World()

    async def test() -> None:
        await world.fleet.drain("server-0")
        with pytest.raises(FleetError, match="server-1 is the last server in service: add another one first"):
            await world.fleet.remove("server-1")
        with pytest.raises(FleetError, match="no server server-7; there are server-0, server-1"):
            await world.fleet.drain("server-7")

    world.run(test())


def test_a_dead_server_is_out_for_every_worker_within_a_beat_or_two_and_comes_back() -> None:
    world = World()

    async def test() -> None:
        world.servers["server-0"].die()
        await asyncio.sleep(2.5)
        assert all("server-0" in listener.client.router.out() for listener in world.listeners.values())
        assert world.fleet.rows()[0].status == "out"
        world.servers["server-0"].restart()
        await asyncio.sleep(8)
        assert not any(listener.client.router.out() for listener in world.listeners.values())

    world.run(test())


def key_error() -> Any:
    raise KeyError("queue")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (key_error, "load raised KeyError('queue')"),
        (lambda: None, "load answered None, which is no ServerLoad"),
        (lambda: ServerLoad(0, 0, None, 0, 0, 0.0), "load.slots is None"),  # type: ignore[arg-type]
        (lambda: ServerLoad(0, 0, 4, 0, 0, 0.0, cache_usage=float("nan")), "load.cache_usage is nan"),
        (lambda: ServerLoad(0, 0, 4, 1007, 0, 0.0), "load.weight_version has 1007"),
        (lambda: ServerLoad(0, 0, 4, -7, 0, 0.0), "load.weight_version is -7"),
    ],
    ids=["raises", "None", "slots", "cache", "future", "negative"],
)
def test_a_server_whose_load_is_odd_is_out_with_the_reason_and_the_others_are_looked_after(
    answer: Callable[[], Any], told: str
) -> None:
    world = World(count=3)

    async def load() -> Any:
        return answer()

    async def test() -> None:
        await world.manager.update_weights(WeightInfo(version=7, path="unused", bytes=0))
        world.servers["server-0"].load = load
        await asyncio.sleep(2.5)
        row = world.fleet.rows()[0]
        assert row.status == "out"
        assert f"server server-0 broke the protocol: {told}" in row.reason
        assert all(set(listener.client.router.out()) == {"server-0"} for listener in world.listeners.values())
        world.servers["server-1"].die()
        await asyncio.sleep(2.5)
        assert [row.status for row in world.fleet.rows()] == ["out", "out", "serving"], "the beat goes on"
        assert len((await world.generate(0, 5, "s")).token_ids) == 5
        del world.servers["server-0"].load
        world.servers["server-1"].restart()
        await asyncio.sleep(20)
        assert {row.status for row in world.fleet.rows()} == {"serving"}
        assert not any(listener.client.router.out() for listener in world.listeners.values())
        assert world.listeners["agent-0"].news[-1].newest == 7

    world.run(test())


def test_a_server_that_cannot_move_its_requests_keeps_nobody_from_draining_it() -> None:
    world = World()

    async def test() -> None:
        world.servers["server-0"].abort = lambda ids: key_error()
        calls = [world.generate(0, 100, f"s{i}") for i in range(4)]
        await asyncio.sleep(1)
        await world.fleet.drain("server-0", deadline=2.0)
        assert (await world.servers["server-0"].load()).running == 0
        assert {len(got.token_ids) for got in await asyncio.gather(*calls)} == {100}

    world.run(test())


def test_a_server_that_dies_and_comes_back_is_told_once_each_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    told: list[tuple[str, str]] = []

    async def test() -> None:
        world.fleet.on_service = lambda server, what: told.append((server, what))
        await world.servers["server-0"].close()
        await asyncio.sleep(5)
        world.manager.servers["server-0"] = world.server()
        await asyncio.sleep(5)
        assert [server for server, _ in told] == ["server-0", "server-0"]
        assert told[0][1].startswith("server-0 is out of service: ")
        assert told[1][1] == "server-0 is back in service with version 0"
        assert [record.message for record in caplog.records if "service" in record.message] == [w for _, w in told]
        assert world.manager.service() == {"server-0": ("serving", 1), "server-1": ("serving", 0)}

    world.run(test())


def test_a_server_that_hangs_is_taken_out_and_holds_up_no_beat() -> None:
    world = World()

    async def hang() -> Any:
        await asyncio.sleep(1e6)

    async def test() -> None:
        world.servers["server-1"].load = hang
        heard = len(world.listeners["agent-0"].news)
        await asyncio.sleep(SILENT_SECONDS + 4)
        assert len(world.listeners["agent-0"].news) - heard >= SILENT_SECONDS / 2
        assert "no load" in world.listeners["agent-0"].news[-1].out["server-1"]

    world.run(test())


def test_a_worker_that_starts_late_or_is_gone_disturbs_nobody() -> None:
    world = World()

    async def test() -> None:
        world.listeners["agent-1"].deaf = True
        await world.fleet.add()
        late = world.listeners["agent-2"] = InProcess({}, 2)
        await asyncio.sleep(2.5)
        assert sorted(late.client.router.servers) == ["server-0", "server-1", "server-2"]
        assert late.news[-1].handles is None
        assert sorted(world.listeners["agent-0"].client.router.servers) == ["server-0", "server-1", "server-2"]

    world.run(test())


def test_no_server_gets_more_than_its_slots_and_their_spare_while_requests_wait_in_line() -> None:
    world = World(slots=8)

    async def test() -> None:
        await asyncio.sleep(1.5)
        calls = [world.generate(i % 2, 30, f"s{i}") for i in range(100)]
        for _ in range(10):
            await asyncio.sleep(1.0)
            for server in world.servers.values():
                load = await server.load()
                assert load.running + load.waiting <= 8 + 2 + 2
        assert sum(listener.client.waiting for listener in world.listeners.values()) > 0
        assert all(len(got.token_ids) == 30 for got in await asyncio.gather(*calls))

    world.run(test())


def test_when_one_of_three_servers_is_killed_no_request_fails_and_the_others_are_full_within_5_seconds() -> None:
    world = World(count=3, slots=8)

    async def session(number: int) -> None:
        for turn in range(1000):
            got = await world.generate(number % 2, 20 + number, f"s{number}-{turn}")
            assert (got.stop_reason, len(got.token_ids)) == ("length", 20 + number)

    async def tokens() -> int:
        return sum([(await world.servers[name].load()).tokens_generated for name in ("server-1", "server-2")])

    async def test() -> None:
        sessions = [asyncio.ensure_future(session(number)) for number in range(28)]
        await asyncio.sleep(20)
        world.servers["server-0"].die()
        await asyncio.sleep(5)
        before = await tokens()
        await asyncio.sleep(20)
        assert await tokens() - before >= 0.95 * 20 * 2 * 8 / SIM.token_seconds
        assert not any(task.done() for task in sessions)
        world.servers["server-0"].restart()
        await asyncio.sleep(10)
        assert (await world.servers["server-0"].load()).running >= 7
        for task in sessions:
            task.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)

    world.run(test())


def test_workers_that_hear_of_each_other_fill_the_slots_nearly_as_an_oracle_would() -> None:
    assert run_virtual(slot_use(4, of=16, rounds=3.0)) >= 0.95


def test_a_server_that_comes_back_or_joins_is_asleep_or_awake_as_the_others_are() -> None:
    world = World()

    async def test() -> None:
        calls = [world.generate(0, 20, f"s{i}") for i in range(4)]
        await asyncio.sleep(0.5)
        await world.manager.sleep()
        world.servers["server-0"].die("killed while asleep")
        await asyncio.sleep(0.5)
        world.servers["server-0"].restart()
        assert not (await world.servers["server-0"].load()).asleep, "its process knows nothing"
        await asyncio.sleep(3)
        assert (await world.servers["server-0"].load()).asleep
        await world.fleet.add()
        assert (await world.servers["server-2"].load()).asleep
        await asyncio.sleep(2)
        assert {row.status for row in world.fleet.rows()} == {"asleep"}
        await asyncio.sleep(30)
        assert not any(call.done() for call in calls)
        await world.manager.wake_up()
        assert [len(got.token_ids) for got in await asyncio.gather(*calls)] == [20] * 4, "no request was lost"
        assert {name: (await server.load()).asleep for name, server in world.servers.items()} == dict.fromkeys(
            ("server-0", "server-1", "server-2"), False
        )

    world.run(test())


def test_a_request_waits_for_the_only_server_that_died_asleep_however_long_all_sleep() -> None:
    world = World(count=1, workers=1)

    async def test() -> None:
        await world.manager.sleep()
        world.servers["server-0"].die("killed while asleep")
        await asyncio.sleep(2)
        call = world.generate(0, 20, "s")
        await asyncio.sleep(2000)  # many times as long as requests wait for any server
        await world.manager.wake_up()
        await asyncio.sleep(5)
        world.servers["server-0"].restart()
        assert len((await call).token_ids) == 20

    world.run(test())


def test_a_server_that_was_out_of_reach_when_the_others_woke_up_wakes_up_on_the_next_beat() -> None:
    world = World()

    async def test() -> None:
        await world.manager.sleep()
        deaf = world.servers["server-1"]
        wake_up, deaf.wake_up = deaf.wake_up, world.servers["server-0"].wake_up
        await world.manager.wake_up()
        assert (await deaf.load()).asleep
        deaf.wake_up = wake_up
        await asyncio.sleep(2)
        assert not (await deaf.load()).asleep

    world.run(test())


def test_workers_hear_that_the_servers_sleep() -> None:
    world = World(workers=1)

    async def test() -> None:
        await world.manager.sleep()
        await asyncio.sleep(1.5)
        assert world.listeners["agent-0"].news[-1].asleep
        call = world.generate(0, 5, "s")
        await asyncio.sleep(1500)  # longer than a server has to answer
        await world.manager.wake_up()
        assert (await call).stop_reason == "length"
        await asyncio.sleep(1.5)
        assert not world.listeners["agent-0"].news[-1].asleep

    world.run(test())
