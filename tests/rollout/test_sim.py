"""What only a simulation can promise: exact times, and failures on demand."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.llm.protocol import Generation, SamplingParams, ServerDied
from streamrl.rollout.sim.script import response_lengths
from streamrl.rollout.sim.server import SimConfig, SimServer
from streamrl.rollout.sim.virtual_clock import run_virtual
from streamrl.weight_sync import WeightStore


def ask(server: SimServer, name: str, tokens: int) -> asyncio.Task[Generation]:
    return asyncio.ensure_future(server.generate(name, [1], SamplingParams(max_tokens=tokens)))


def test_constant_latencies_make_exact_times_and_slots_make_others_wait() -> None:
    async def main() -> None:
        server = SimServer(SimConfig(token_seconds=0.5, prefill_seconds=2.0), max_num_seqs=2)
        results = await asyncio.gather(*(ask(server, f"r{i}", 10) for i in range(3)))
        assert [r.queue_seconds for r in results] == pytest.approx([0, 0, 7])
        assert [r.engine_seconds for r in results] == pytest.approx([7, 7, 7])
        load = await server.load()
        assert load.busy_seconds == pytest.approx(14)

    run_virtual(main())


def test_an_update_stamps_by_the_time_of_each_token_and_stands_generation_still() -> None:
    async def main() -> None:
        server = SimServer(SimConfig(token_seconds=1.0, update_seconds=5.0))
        task = ask(server, "r", 10)
        await asyncio.sleep(3.5)
        await server.update_weights("unused", 4)
        assert asyncio.get_running_loop().time() == pytest.approx(8.5)
        got = await task
        assert got.weight_versions == [0] * 3 + [4] * 7
        assert asyncio.get_running_loop().time() == pytest.approx(15)

    run_virtual(main())


def test_an_abort_keeps_exactly_the_tokens_of_the_past() -> None:
    async def main() -> None:
        server = SimServer(SimConfig(token_seconds=1.0))
        task = ask(server, "r", 10)
        await asyncio.sleep(4.5)
        await server.abort(["r"])
        assert len((await task).token_ids) == 4
        assert (await server.load()).tokens_generated == 4

    run_virtual(main())


def test_it_dies_after_so_many_tokens_of_all_requests_and_comes_back_with_the_newest_weights(tmp_path: Path) -> None:
    async def main() -> None:
        store = WeightStore(tmp_path)
        server = SimServer(SimConfig(token_seconds=1.0, die_after_tokens=25), weights_dir=str(tmp_path))
        short, long = ask(server, "short", 5), ask(server, "long", 100)
        assert len((await short).token_ids) == 5
        with pytest.raises(ServerDied, match="25"):
            await long
        assert asyncio.get_running_loop().time() == pytest.approx(20)
        with pytest.raises(ServerDied):
            await server.load()
        store.write({"w": torch.ones(1)}, 3)
        server.restart()
        assert (await ask(server, "again", 2)).weight_versions == [3, 3]

    run_virtual(main())


def test_a_share_of_long_responses_leaves_the_mean_as_it_is() -> None:
    sim = SimConfig(response_tokens_mean=100, long_share=0.1, long_times=6)
    draws = np.random.default_rng(5).random((2, 20_000))
    lengths = response_lengths(sim, *draws)
    assert lengths.mean() == pytest.approx(100, rel=0.03)
    assert set(lengths.tolist()) == {67, 400}


def test_drawn_lengths_and_times_have_the_configured_means() -> None:
    async def main() -> None:
        sim = SimConfig(response_tokens_mean=40, response_tokens_sigma=0.6, token_seconds=0.02, token_sigma=0.5)
        server = SimServer(sim, max_num_seqs=2000)
        sampling = SamplingParams(max_tokens=900, stop_token_ids=(7,))
        results = await asyncio.gather(*(server.generate(f"r{i}", [1], sampling) for i in range(2000)))
        lengths = np.array([len(r.token_ids) for r in results])
        assert lengths.mean() == pytest.approx(40, rel=0.05)
        assert np.log(lengths).std() == pytest.approx(0.6, rel=0.1)
        seconds = sum(r.engine_seconds for r in results)
        assert seconds / lengths.sum() == pytest.approx(0.02, rel=0.05)

    run_virtual(main())


def test_two_runs_are_equal_in_every_number() -> None:
    async def main() -> list[object]:
        sim = SimConfig(response_tokens_sigma=0.6, token_sigma=0.5, prefill_seconds=0.1)
        server = SimServer(sim, max_num_seqs=3, seed=5)
        sampling = SamplingParams(max_tokens=200, stop_token_ids=(7,))
        results = await asyncio.gather(*(server.generate(f"r{i}", [1], sampling) for i in range(30)))
        return [*results, asyncio.get_running_loop().time()]

    assert run_virtual(main()) == run_virtual(main())


@pytest.mark.parametrize("bad", [{"token_seconds": -1}, {"response_tokens_mean": 0}, {"unknown": 1}])
def test_a_config_that_cannot_be_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises((ValueError, TypeError)):
        SimConfig.of(bad)


class Recorder:
    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float, dict[str, Any]]] = []
        self.states: list[str | float] = []

    def span_at(self, name: str, start: float, end: float, /, **fields: Any) -> None:
        self.spans.append((name, start, end, fields))

    def state(self, name: str, value: str | float, /, **labels: Any) -> None:
        self.states.append(value)


def test_reported_spans_add_up_to_busy_time_and_tokens_and_do_not_overlap() -> None:
    async def main() -> None:
        events = Recorder()
        server = SimServer(SimConfig(token_seconds=0.1), max_num_seqs=2, server="s1", events=events)
        for _ in range(3):
            await asyncio.gather(*(ask(server, f"r{i}", 7 + i) for i in range(9)))
            await asyncio.sleep(5)
        await server.update_weights("unused", 1)
        load = await server.load()
        await server.close()
        busy = [(start, end, fields) for name, start, end, fields in events.spans if name == "server_busy"]
        assert sum(end - start for start, end, _ in busy) == pytest.approx(load.busy_seconds)
        assert sum(fields["tokens"] for *_, fields in busy) == load.tokens_generated
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(busy))
        assert events.spans[-1][3] == {"server": "s1", "version": 1}
        assert events.states == ["started"]

    run_virtual(main())


async def test_a_busy_event_loop_takes_no_time_from_the_engine() -> None:
    """On the machine's clock: both timers fire late, the second request had the slot from the end of the first."""
    server = SimServer(SimConfig(token_seconds=0.001), max_num_seqs=1)
    asked = [ask(server, name, 20) for name in ("first", "second")]
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251
    answers = await asyncio.gather(*asked)
    assert [answer.engine_seconds for answer in answers] == pytest.approx([0.02, 0.02])
    assert answers[1].queue_seconds == pytest.approx(0.02, abs=0.01)
