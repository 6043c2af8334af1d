"""vLLM with a sleep level: its memory is given up, what was running waits again and goes on with its tokens. On a
CPU vLLM does the steps and keeps its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agent_loop.llm.protocol import LLMServer, SamplingParams, ServerDied
from streamrl.rollout.vllm.server import VllmServer
from tests.rollout import test_llm_server_asleep as asleep
from tests.rollout.test_llm_server import LONG, Case, check, start, until_tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def at_level(vllm_engine: Any, other_weights: Any) -> Callable[[int], Case]:
    def case(level: int) -> Case:
        config = replace(vllm_engine._config, vllm={**vllm_engine._config.vllm, "sleep_level": level})
        return Case(
            "vllm",
            lambda: VllmServer(config, engine=vllm_engine),
            lambda version: other_weights("wide", version, version).path,
            scores=False,
        )

    return case


@pytest.mark.parametrize(
    "test",
    [
        asleep.test_a_request_that_comes_during_sleep_waits_and_ends_after_it,
        asleep.test_an_abort_during_sleep_is_answered_at_once_with_the_tokens_there_are,
        asleep.test_several_versions_may_come_during_one_sleep_and_the_last_one_serves,
        asleep.test_sleeping_twice_is_one_sleep_and_waking_an_awake_server_is_nothing,
        asleep.test_a_pause_outlives_a_sleep_within_it,
        asleep.test_a_server_that_is_closed_asleep_fails_what_waits,
    ],
)
def test_with_a_level_it_does_what_every_server_does(at_level: Any, test: Callable[[Case], None]) -> None:
    test(at_level(1))


def test_a_running_request_leaves_the_engine_and_samples_what_it_would_have_sampled(at_level: Any) -> None:
    async def test(server: LLMServer) -> None:
        greedy = SamplingParams(max_tokens=LONG, temperature=0.0)
        alone = await server.generate("alone", [1, 2, 3], greedy)
        running = asyncio.ensure_future(server.generate("slept", [1, 2, 3], greedy))
        for _ in range(2):
            await until_tokens(server, (await server.load()).tokens_generated + 20)
            await server.sleep()
            load = await server.load()
            assert (load.running, load.waiting) == (0, 1), "it waits again"
            await server.wake_up()
        got = await running
        check(got)
        assert got.token_ids == alone.token_ids
        assert got.log_probs == pytest.approx(alone.log_probs, abs=1e-3)

    at_level(1).run(test)


def test_at_level_two_it_wakes_up_with_the_new_weights_or_not_at_all(at_level: Any) -> None:
    case = at_level(2)

    async def test(server: LLMServer) -> None:
        running = start(server, "running", LONG)
        await until_tokens(server, 10)
        await server.sleep()
        await server.update_weights(case.publish(1), 1)
        await server.wake_up()
        got = await running
        assert set(got.weight_versions) == {0, 1}
        await server.sleep()
        with pytest.raises(ServerDied, match="before it got weights"):
            await server.wake_up()

    case.run(test)
