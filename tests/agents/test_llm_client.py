"""The routed client: deaths, aborts and swaps stay below it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from agent_loop.llm.awake import AwakeTime
from agent_loop.llm.client import NoServer, Patience, PoisonRequest, RoutedClient
from agent_loop.llm.fleet import FleetNews
from agent_loop.llm.metered import MeteredClient
from agent_loop.llm.protocol import ContextOverflow, Generation, SamplingParams, ServerDied
from agent_loop.llm.router import ServerNews
from streamrl.rollout.sim.server import SimConfig, SimServer
from streamrl.rollout.sim.virtual_clock import run_virtual
from tests.agents.fakes import FakeServer, generation

PROMPT = [1, 2, 3]
QUICK = Patience(healthy=10.0, answer=30.0)


def counting(prompt_ids: list[int], sampling: SamplingParams) -> list[int]:
    """Ten tokens in all: 103, 104, ... by position, whatever the pieces were."""
    return list(range(100 + len(prompt_ids), 113))


def test_a_request_whose_server_died_goes_elsewhere() -> None:
    async def main() -> None:
        dead, alive = FakeServer(counting, dead=True), FakeServer(counting)
        client = RoutedClient({"dead": dead, "alive": alive}, patience=QUICK)
        results = await asyncio.gather(
            *(client.generate(PROMPT, SamplingParams(20), session=f"s{i}") for i in range(4))
        )
        assert all(r.token_ids == list(range(103, 113)) and r.stop_reason == "stop" for r in results)
        assert list(client.router.out()) == ["dead"]
        assert client.router.in_flight() == 0
        await client.close()

    run_virtual(main())


def test_an_aborted_request_continues_from_its_tokens_and_never_exceeds_its_budget() -> None:
    pieces: list[int] = []

    def abort_after_three(prompt_ids: list[int], sampling: SamplingParams) -> Generation:
        pieces.append(sampling.max_tokens)
        tokens = [100 + len(prompt_ids) + i for i in range(3)]
        return generation(tokens, sampling, version=len(pieces), reason="aborted")

    async def main() -> Generation:
        return await RoutedClient({"a": FakeServer(abort_after_three)}).generate(PROMPT, SamplingParams(8), session="s")

    result = run_virtual(main())
    assert result.token_ids == list(range(103, 111))
    assert result.weight_versions == [1, 1, 1, 2, 2, 2, 3, 3]
    assert result.stop_reason == "length"
    assert pieces == [8, 5, 2]
    assert result.engine_seconds == pytest.approx(0.6)


def test_tokens_from_before_a_death_are_kept() -> None:
    def abort_once(prompt_ids: list[int], sampling: SamplingParams) -> Generation | ServerDied:
        if len(prompt_ids) > len(PROMPT):
            return ServerDied("killed")
        return generation([103, 104], sampling, reason="aborted")

    async def main() -> None:
        first, second = FakeServer(abort_once), FakeServer(counting)
        client = RoutedClient({"first": first, "second": second}, patience=QUICK)
        result = await client.generate(PROMPT, SamplingParams(20), session="s")
        assert result.token_ids == list(range(103, 113))
        assert second.calls[-1][1] == [*PROMPT, 103, 104]
        assert second.calls[-1][2].max_tokens == 18
        await client.close()

    run_virtual(main())


def test_a_request_waits_for_a_server_that_comes_back() -> None:
    async def main() -> None:
        server = FakeServer(counting, dead=True)
        client = RoutedClient({"only": server}, patience=QUICK)
        asyncio.get_running_loop().call_later(4.0, setattr, server, "dead", False)
        result = await client.generate(PROMPT, SamplingParams(20), session="s")
        assert result.stop_reason == "stop"
        assert server.probes < 10
        assert client.router.out() == {}
        probes = server.probes
        await asyncio.sleep(100)
        assert server.probes == probes, "a healthy server is not probed"
        await client.close()

    run_virtual(main())


def test_without_a_healthy_server_the_wait_ends_with_who_is_out_and_why() -> None:
    async def main() -> None:
        client = RoutedClient({"only": FakeServer(counting, dead=True)}, patience=QUICK)
        with pytest.raises(
            NoServer, match=r"s7 waited 10 s for a healthy LLM server \(only: health check: connection refused\)"
        ):
            await client.generate(PROMPT, SamplingParams(20), session="s7")
        assert client.router.in_flight() == 0
        await client.close()

    run_virtual(main())


def test_a_server_that_comes_back_with_old_weights_stays_out() -> None:
    async def main() -> None:
        stale, fresh = FakeServer(counting, dead=True, version=3), FakeServer(counting, version=5)
        client = RoutedClient({"stale": stale, "fresh": fresh}, patience=QUICK)
        await client.generate(PROMPT, SamplingParams(20), session="s1")
        await client.generate(PROMPT, SamplingParams(20), session="s2")
        stale.dead = False
        await asyncio.sleep(20)
        assert list(client.router.out()) == ["stale"]
        await stale.update_weights("", 5)
        await asyncio.sleep(20)
        assert client.router.out() == {}
        await client.close()

    run_virtual(main())


def test_a_silent_server_counts_as_dead_and_is_told_to_abort() -> None:
    async def main() -> None:
        silent, prompt = FakeServer(counting, seconds=1e6), FakeServer(counting)
        client = RoutedClient({"silent": silent, "prompt": prompt}, patience=QUICK)
        results = await asyncio.gather(
            *(client.generate(PROMPT, SamplingParams(20), session=f"s{i}") for i in range(2))
        )
        assert all(r.stop_reason == "stop" for r in results)
        assert silent.aborted == [silent.calls[0][0]]
        await client.close()

    run_virtual(main())


def test_a_cancelled_request_frees_its_slot() -> None:
    async def main() -> None:
        server = FakeServer(counting, seconds=5.0)
        client = RoutedClient({"a": server})
        task = asyncio.create_task(client.generate(PROMPT, SamplingParams(20), session="s"))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert server.aborted == [server.calls[0][0]]
        assert client.router.in_flight() == 0
        await client.close()

    run_virtual(main())


@pytest.mark.parametrize("slots", [1, 2])
def test_a_cancelled_request_tells_what_it_had_sampled_and_the_slot_time_it_held(slots: int) -> None:
    async def main() -> None:
        server = SimServer(SimConfig(response_tokens_mean=100, token_seconds=1.0), max_num_seqs=slots)
        client = RoutedClient({"a": server})
        counted: list[dict[str, float]] = [{}, {}]
        calls = [
            asyncio.create_task(MeteredClient(client, found).generate(PROMPT, SamplingParams(200, seed=1), session="s"))
            for found in counted
        ]
        await asyncio.sleep(10.5)
        for call in calls:
            call.cancel()
        assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*calls, return_exceptions=True))
        tokens = [found["generated_tokens"] for found in counted]
        assert tokens == [10, 10 if slots == 2 else 0], "one that waited for a slot had none"
        assert counted[0]["engine_seconds"] == 10.5
        assert (counted[1]["engine_seconds"], counted[1]["queue_seconds"]) == ((10.5, 0) if slots == 2 else (0, 10.5))
        assert (await server.load()).tokens_generated == sum(tokens)
        assert ((await server.load()).running, client.router.in_flight()) == (0, 0)
        await client.close()

    run_virtual(main())


def test_a_cancelled_request_does_not_wait_for_a_server_that_hangs() -> None:
    class Hanging(FakeServer):
        async def abort(self, request_ids: list[str] | None = None) -> int:
            await asyncio.sleep(1e6)
            return 1

    async def main() -> None:
        client = RoutedClient({"a": Hanging(counting, seconds=1e6)}, patience=Patience(abort=2.0))
        task = asyncio.create_task(client.generate(PROMPT, SamplingParams(20), session="s"))
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert asyncio.get_running_loop().time() - began == 2.0
        await client.close()

    run_virtual(main())


def test_a_server_that_aborts_without_a_token_is_not_hammered_and_not_waited_for_for_ever() -> None:
    async def main() -> None:
        server = FakeServer(lambda p, s: Generation(stop_reason="aborted"))
        client = RoutedClient({"a": server}, patience=QUICK)
        with pytest.raises(ServerDied, match="server a kept aborting for 10 s without a token"):
            await client.generate(PROMPT, SamplingParams(20), session="s")
        assert len(server.calls) < 12

    run_virtual(main())


def test_a_request_under_which_every_server_dies_is_given_up() -> None:
    async def main() -> None:
        servers = {f"s{i}": FakeServer(lambda p, s: ServerDied("crashed")) for i in range(2)}
        client = RoutedClient(servers)
        with pytest.raises(PoisonRequest, match="3 LLM servers died under this request, .*: crashed"):
            await client.generate(PROMPT, SamplingParams(20), session="s")
        with pytest.raises(PoisonRequest):
            await client.generate(PROMPT, SamplingParams(20), session="another sample of the same prompt")
        assert sum(len(server.calls) for server in servers.values()) == 3
        await client.close()

    run_virtual(main())


def test_an_overlong_context_is_the_callers_error_and_takes_no_server_out() -> None:
    async def main() -> None:
        client = RoutedClient({"a": FakeServer(lambda p, s: ContextOverflow("too long"))})
        with pytest.raises(ContextOverflow):
            await client.generate(PROMPT, SamplingParams(20), session="s")
        assert client.router.out() == {}
        assert client.router.in_flight() == 0

    run_virtual(main())


def test_a_server_that_comes_back_awake_while_all_sleep_gets_nothing_until_it_sleeps_too() -> None:
    class Comes(FakeServer):
        asleep = False

        async def load(self):
            return replace(await super().load(), asleep=self.asleep)

    async def main() -> None:
        server, awake = Comes(counting, dead=True), AwakeTime()
        client = RoutedClient({"a": server}, patience=QUICK, awake=awake)
        request = asyncio.ensure_future(client.generate(PROMPT, SamplingParams(20), session="s"))
        await asyncio.sleep(0.01)
        awake.tell(asleep=True)
        server.dead = False
        await asyncio.sleep(QUICK.healthy / 2)
        assert client.router.out()["a"] == "it came back awake while all servers sleep"
        server.asleep = True
        await request
        await client.close()

    run_virtual(main())


def test_close_lets_waiting_requests_go_as_aborted() -> None:
    async def main() -> None:
        client = RoutedClient({"a": FakeServer(counting, dead=True)})
        task = asyncio.create_task(client.generate(PROMPT, SamplingParams(20), session="s"))
        await asyncio.sleep(1)
        await client.close()
        assert (await task).stop_reason == "aborted"

    run_virtual(main())


def test_exchanged_servers_join_after_a_health_check() -> None:
    async def main() -> None:
        old, new = FakeServer(counting), FakeServer(counting)
        client = RoutedClient({"a": old})
        await client.generate(PROMPT, SamplingParams(20), session="s")
        client.set_servers({"a": new})
        await client.generate(PROMPT, SamplingParams(20), session="s")
        assert len(old.calls) == 1
        assert len(new.calls) == 1
        assert new.probes == 1
        await client.close()

    run_virtual(main())


def test_tokens_whose_scorer_died_are_scored_elsewhere_and_a_dead_one_comes_back() -> None:
    async def main() -> None:
        servers = {"a": FakeServer(counting, seconds=1.0), "b": FakeServer(counting, seconds=1.0)}
        client = RoutedClient(servers, patience=QUICK)
        asked = [asyncio.ensure_future(client.score(PROMPT, [5, 6 + i], 0.7, session=f"s{i}")) for i in range(6)]
        await asyncio.sleep(0.5)
        servers["a"].dead = True
        found = await asyncio.gather(*asked)
        assert [scores.log_probs for scores in found] == [[-0.005, -(6 + i) / 1000] for i in range(6)]
        assert list(client.router.out()) == ["a"]
        assert {temperature for _, _, temperature in servers["b"].scored} == {0.7}
        servers["b"].dead, servers["a"].dead = True, False
        assert (await client.score(PROMPT, [7], 1.0, session="t")).log_probs == [-0.007]
        assert client.router.in_flight() == 0
        await client.close()
        with pytest.raises(ServerDied, match="the run stops"):
            await client.score(PROMPT, [7], 1.0, session="u")

    run_virtual(main())


def test_the_wait_for_any_server_stands_still_while_all_sleep() -> None:
    async def main() -> None:
        client = RoutedClient({"only": FakeServer(counting, dead=True)}, patience=QUICK)
        clock = asyncio.get_running_loop().time
        early = asyncio.ensure_future(client.generate(PROMPT, SamplingParams(20), session="early"))
        await asyncio.sleep(4)
        client.hear(FleetNews(asleep=True))
        within = asyncio.ensure_future(client.generate(PROMPT, SamplingParams(20), session="within"))
        await asyncio.sleep(1000)
        assert not early.done()
        client.hear(FleetNews())
        for call, when in ((early, 1010), (within, 1014)):
            with pytest.raises(NoServer, match="waited 10 s"):
                await call
            assert clock() == pytest.approx(when, abs=0.2)
        await client.close()

    run_virtual(main())


def test_a_scorer_that_is_silent_counts_as_dead() -> None:
    async def main() -> None:
        hung, alive = FakeServer(counting, seconds=1e6), FakeServer(counting)
        client = RoutedClient({"hung": hung, "alive": alive}, patience=QUICK)
        found = await asyncio.gather(*(client.score(PROMPT, [9], 1.0, session=f"s{i}") for i in range(2)))
        assert [scores.log_probs for scores in found] == [[-0.009]] * 2
        assert len(alive.scored) == 2
        await client.close()

    run_virtual(main())


def test_without_a_scorer_the_wait_ends_with_the_reasons() -> None:
    async def main() -> None:
        client = RoutedClient({"t": FakeServer(counting, dead=True)}, patience=QUICK)
        with pytest.raises(NoServer, match="t: health check"):
            await client.score(PROMPT, [9], 1.0, session="s")
        await client.close()

    run_virtual(main())


class Growing(FakeServer):
    """One token of `counting` per second, told by `progress` as they come."""

    begun: dict[str, tuple[float, list[int], SamplingParams]]

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams, images: Sequence[bytes] = ()
    ) -> Generation:
        self.begun = getattr(self, "begun", {})
        self.begun[request_id] = (asyncio.get_running_loop().time(), list(prompt_ids), sampling)
        self.seconds = float(len(counting(prompt_ids, sampling)))
        return await super().generate(request_id, prompt_ids, sampling, images)

    async def progress(self, have: Mapping[str, int]) -> dict[str, Generation]:
        if self.dead:
            raise ServerDied("connection lost")
        told: dict[str, Generation] = {}
        for id, known in have.items():
            since, prompt, sampling = self.begun[id]
            made = int(asyncio.get_running_loop().time() - since)
            told[id] = generation(counting(prompt, sampling)[known:made], sampling, self.version)
        return told


def test_the_tokens_that_a_server_had_made_when_it_died_are_kept() -> None:
    async def main() -> None:
        servers = {"a": Growing(counting, version=3), "b": Growing(counting, version=4)}
        client = RoutedClient(servers, patience=QUICK)
        call = asyncio.create_task(client.generate(PROMPT, SamplingParams(20), session="s"))
        await asyncio.sleep(6.2)
        servers["a"].dead = True
        result = await call
        assert result.token_ids == list(range(103, 113))
        assert result.weight_versions == [3] * 6 + [4] * 4
        assert (servers["b"].calls[0][1], servers["b"].calls[0][2].max_tokens) == ([*PROMPT, *range(103, 109)], 14)
        await client.close()

    run_virtual(main())


def test_a_server_that_hangs_is_found_by_its_heartbeat() -> None:
    class Hanging(Growing):
        async def progress(self, have: Mapping[str, int]) -> dict[str, Generation]:
            if asyncio.get_running_loop().time() > 4.0:
                await asyncio.sleep(1e6)
            return await super().progress(have)

    async def main() -> None:
        servers = {"hung": Hanging(counting), "ok": Growing(counting)}
        client = RoutedClient(servers, patience=Patience(silent=5.0, answer=1e5))
        result = await client.generate(PROMPT, SamplingParams(20), session="s")
        assert result.token_ids == list(range(103, 113))
        assert len(servers["ok"].calls[0][1]) == len(PROMPT) + 4
        assert asyncio.get_running_loop().time() == pytest.approx(9.5 + 6, abs=1.0)
        assert servers["hung"].aborted
        await client.close()

    run_virtual(main())


def test_requests_beyond_a_servers_limit_wait_in_line_and_go_first_come_first_served() -> None:
    async def main() -> None:
        server = FakeServer(counting, seconds=1.0)
        client = RoutedClient({"a": server}, patience=QUICK)
        client.hear(FleetNews(servers={"a": ServerNews(max_requests=2)}))
        calls = [
            asyncio.create_task(client.generate([1, 2, 3, i], SamplingParams(20), session=f"s{i}")) for i in range(7)
        ]
        await asyncio.sleep(0.5)
        assert (len(server.calls), client.waiting) == (2, 5)
        calls[2].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert server.most_running == 2
        assert [prompt[-1] for _, prompt, _ in server.calls] == [0, 1, 3, 4, 5, 6]
        assert (client.router.in_flight(), client.waiting) == (0, 0)
        await client.close()

    run_virtual(main())


def test_waiting_for_a_busy_server_has_no_deadline_of_its_own() -> None:
    async def main() -> None:
        server = FakeServer(counting, seconds=25.0)
        client = RoutedClient({"a": server}, patience=QUICK)
        client.hear(FleetNews(servers={"a": ServerNews(max_requests=1)}))
        got = await asyncio.gather(*(client.generate(PROMPT, SamplingParams(20), session=f"s{i}") for i in range(4)))
        assert [result.stop_reason for result in got] == ["stop"] * 4
        assert sorted(round(result.queue_seconds) for result in got) == [0, 25, 50, 75], "it is time in a queue"
        await client.close()

    run_virtual(main())


def test_a_request_that_kills_its_servers_is_given_up_while_its_companions_end() -> None:
    """It dies again and again with whoever is beside it; in the end it is tried alone."""
    poison = [6, 6, 6]

    class Mortal(Growing):
        async def generate(
            self, request_id: str, prompt_ids: list[int], sampling: SamplingParams, images: Sequence[bytes] = ()
        ) -> Generation:
            if prompt_ids[:3] == poison and not self.dead:
                loop = asyncio.get_running_loop()
                loop.call_later(0.3, self.kill)
                loop.call_later(2.0, setattr, self, "dead", False)
            return await super().generate(request_id, prompt_ids, sampling, images)

        def kill(self) -> None:
            self.dead = True
            self.deaths = getattr(self, "deaths", 0) + 1

        async def progress(self, have: Mapping[str, int]) -> dict[str, Generation]:
            return await super().progress(have)

    async def main() -> None:
        servers = {f"s{i}": Mortal(counting) for i in range(3)}
        client = RoutedClient(servers, patience=QUICK)
        others = [client.generate([1, 2, i], SamplingParams(20), session=f"s{i}") for i in range(12)]
        samples = [client.generate(poison, SamplingParams(20), session=f"poison-{i}") for i in range(4)]
        results = await asyncio.gather(*samples, *others, return_exceptions=True)
        assert all(isinstance(result, PoisonRequest) for result in results[:4]), results[:4]
        assert all(isinstance(result, Generation) and result.stop_reason == "stop" for result in results[4:])
        assert sum(getattr(server, "deaths", 0) for server in servers.values()) <= 8
        assert client.router.in_flight() == 0
        await client.close()

    run_virtual(main())


def test_servers_that_come_and_go_by_the_fleets_news() -> None:
    async def main() -> None:
        a, b = FakeServer(counting, seconds=1.0), FakeServer(counting, seconds=1.0)
        client = RoutedClient({"a": a}, patience=QUICK)
        held = client.hear(FleetNews(handles={"a": a, "b": b}))
        assert held == {"a": (0, 0), "b": (0, 0)}
        await asyncio.sleep(1.0)
        await asyncio.gather(*(client.generate(PROMPT, SamplingParams(20), session=f"r{i}") for i in range(4)))
        assert (len(a.calls), len(b.calls)) == (3, 1), "b has to prove itself"
        await asyncio.gather(*(client.generate(PROMPT, SamplingParams(20), session=f"s{i}") for i in range(4)))
        assert (len(a.calls), len(b.calls)) == (5, 3)
        call = asyncio.create_task(client.generate(PROMPT, SamplingParams(20), session="t"))
        await asyncio.sleep(0.1)
        busy = "a" if a.running else "b"
        assert client.hear(FleetNews(draining=frozenset([busy])))[busy] == (1, 23)
        await asyncio.gather(*(client.generate(PROMPT, SamplingParams(20), session=f"u{i}") for i in range(4)))
        await call
        assert (len(a.calls), len(b.calls)) == ((6, 7) if busy == "a" else (9, 4))
        client.hear(FleetNews(out={"a": "it told no load"}))
        assert client.router.servers["a"].reason == "it told no load"
        await client.close()

    run_virtual(main())


def test_a_server_that_leaves_between_the_ticket_and_the_call_costs_nothing() -> None:
    async def main() -> None:
        a, b = FakeServer(counting, seconds=1.0), FakeServer(counting, seconds=5.0)
        client = RoutedClient({"a": a, "b": b}, patience=QUICK)
        client.hear(FleetNews(servers={"a": ServerNews(max_requests=1), "b": ServerNews(max_requests=1)}))
        calls = [asyncio.create_task(client.generate(PROMPT, SamplingParams(20), session=f"s{i}")) for i in range(3)]
        await asyncio.sleep(0.5)
        calls[0].add_done_callback(lambda _: client.hear(FleetNews(handles={"b": b})))
        results = await asyncio.gather(*calls)
        assert [result.stop_reason for result in results] == ["stop"] * 3
        assert client.router.in_flight() == 0
        await client.close()

    run_virtual(main())
