"""A request that runs while weights change keeps its cache: what its tokens are told to have is what a replay says that
holds the keys and values of the old weights, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from agent_loop.llm.protocol import LLMServer, SamplingParams
from tests.rollout.conftest import tiny_model

CLOSE = 1e-3
TOKENS = 480


@dataclass(frozen=True)
class Case:
    model: str
    make: Callable[[], LLMServer]


@pytest.fixture(params=["torch", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
def case(request: pytest.FixtureRequest, model_dirs: dict[str, str]) -> Case:
    if request.param == "vllm":
        return Case("wide", request.getfixturevalue("vllm_engine").server)
    from streamrl.rollout.torch.server import TorchServer

    return Case("qwen2", lambda: TorchServer(model_dirs["qwen2"], max_num_seqs=4, max_model_len=512))


def mixed_log_probs(kind: str, prompt: list[int], response: list[int], old: int) -> list[float]:
    """By transformers, in float32: the first `old` tokens of the response by the model of seed 0; the others by that of
    seed 1, which finds the keys and values that the first one made of all before the last old token."""
    ids, first = torch.tensor([prompt + response]), len(prompt) + old - 1
    with torch.no_grad():
        before = tiny_model(kind, 0)(ids[:, :first], use_cache=True)
        after = tiny_model(kind, 1)(ids[:, first:-1], past_key_values=before.past_key_values)
    logits = torch.cat([before.logits[0, len(prompt) - 1 :], after.logits[0]])  # each token's by the one before it
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()


def test_log_probs_of_a_request_that_straddles_a_swap_are_those_of_a_replay_with_the_old_cache(
    case: Case, other_weights: Any
) -> None:
    async def main() -> None:
        server = case.make()
        try:
            prompt = [4, 5, 6]
            straddling = asyncio.ensure_future(server.generate("r", prompt, SamplingParams(max_tokens=TOKENS)))
            while not await server.progress({"r": 3}):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            await server.update_weights(other_weights(case.model, 1, 1).path, 1)
            got = await straddling
            old = got.weight_versions.count(0)
            assert 0 < old < TOKENS
            assert got.weight_versions == [0] * old + [1] * (TOKENS - old)
            wanted = mixed_log_probs(case.model, prompt, got.token_ids, old)
            assert got.log_probs == pytest.approx(wanted, abs=CLOSE)
            fresh = mixed_log_probs(case.model, prompt, got.token_ids, 1)
            assert got.log_probs[old:] != pytest.approx(fresh[old:], abs=CLOSE), "the old cache makes a difference"
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(main(), 60))
