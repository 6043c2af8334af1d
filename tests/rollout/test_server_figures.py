"""What a server tells of its requests beside their tokens: waiting, first tokens, prefixes, the age of its weights."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_loop.llm.protocol import LLMServer, SamplingParams
from streamrl.rollout.events import Reporter
from streamrl.rollout.sim.server import SimConfig, SimServer
from streamrl.rollout.sim.virtual_clock import run_virtual
from streamrl.rollout.torch.server import TorchServer


def test_a_simulated_server_tells_waits_and_first_tokens_to_the_moment() -> None:
    async def main() -> None:
        server = SimServer(SimConfig(token_seconds=1.0, prefill_seconds=0.0), max_num_seqs=2)
        calls = [server.generate(f"r{i}", [1], SamplingParams(max_tokens=10)) for i in range(4)]
        await asyncio.gather(*calls)
        load = await server.load()
        assert load.first_tokens == 4
        assert load.queue_seconds == pytest.approx(20.0), "two waited for ten tokens of the others"
        assert load.first_token_seconds == pytest.approx(20.0 + 4 * 1.0)
        assert load.prompt_tokens == 0, "there is no cache of which hits could be told"
        aborted = asyncio.ensure_future(server.generate("none", [1], SamplingParams(max_tokens=10)))
        await asyncio.sleep(0.5)
        await server.abort()
        assert (await aborted).token_ids == []
        assert (await server.load()).first_tokens == 4, "one without a token is none"

    run_virtual(main())


def test_the_age_of_the_weights_starts_again_with_each_swap() -> None:
    async def main() -> None:
        server = SimServer()
        await server.load()
        await asyncio.sleep(7.0)
        assert (await server.load()).weights_seconds == pytest.approx(7.0)
        await server.update_weights("unused", 1)
        await asyncio.sleep(2.0)
        assert (await server.load()).weights_seconds == pytest.approx(2.0)

    run_virtual(main())


async def test_the_torch_engine_tells_first_tokens_once_and_the_prefixes_it_found(model_dirs: dict[str, str]) -> None:
    server: LLMServer = TorchServer(model_dirs["qwen2"], max_num_seqs=2, max_model_len=256)
    try:
        prompt = list(range(1, 41))
        got = await server.generate("first", prompt, SamplingParams(max_tokens=8))
        await server.generate("second", [*prompt, *got.token_ids[:-1], 9], SamplingParams(max_tokens=2))
        load = await server.load()
        assert load.first_tokens == 2
        assert load.prompt_tokens == 40 + 48
        assert load.cached_tokens == 47, "all but the token that the first turn did not have"
        assert 0.0 <= load.queue_seconds <= load.first_token_seconds

        running = asyncio.ensure_future(server.generate("slept", prompt, SamplingParams(max_tokens=150)))
        while (await server.load()).first_tokens < 3:  # noqa: ASYNC110  # a server announces no tokens
            await asyncio.sleep(0.001)
        await server.sleep()
        assert (await server.load()).asleep
        await server.wake_up()
        assert len((await running).token_ids) == 150
        after = await server.load()
        assert not after.asleep
        assert after.first_tokens == 3, "its cache was computed again, its first token was not"
        assert after.weights_seconds > 0.0
    finally:
        await server.close()


def test_a_reporter_keeps_what_a_load_tells() -> None:
    report = Reporter("s", None)
    report.first_token(0.5, 2.0)
    report.first_token(0.0, 1.0)
    assert report.figures(10.0) == dict(
        busy_seconds=0.0, first_tokens=2, queue_seconds=0.5, first_token_seconds=3.0, weights_seconds=0.0
    )
    events: dict[str, Any] = report.figures(12.5)
    assert events["weights_seconds"] == 2.5
    report.weights(13.0, 14.0, 3)
    assert report.figures(20.0)["weights_seconds"] == 6.0
