"""What SGLang's answers say of one request."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from agent_loop.llm.protocol import SamplingParams
from streamrl.rollout.sglang.options import Cuts
from streamrl.rollout.sglang.request import SUPPORT_LOG_PROBS, Call, added, body, new_salt, versions


def meta(tokens: list[int], first: int = 0) -> dict[str, Any]:
    return {
        "completion_tokens": first + len(tokens),
        "output_token_logprobs": [[-float(token), token, None] for token in tokens],
    }


def test_new_tokens_and_all_tokens_so_far_add_the_same() -> None:
    assert added([8, 9], meta([8, 9], first=3), 3) == ([8, 9], [-8.0, -9.0])
    assert added([5, 6, 7, 8, 9], meta([5, 6, 7, 8, 9]), 3) == ([8, 9], [-8.0, -9.0])
    assert added([], meta([], first=3), 3) == ([], [])


def test_tokens_without_log_probs_are_not_taken() -> None:
    with pytest.raises(ValueError, match="2 new tokens, but 2 ids and 1 log-probs"):
        added([8, 9], {"completion_tokens": 2, "output_token_logprobs": [[-1.0, 8, None]]}, 0)


def test_spans_become_one_version_per_token() -> None:
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}]
    assert versions({"weight_versions": spans}, 3) == [4, 4, 5]
    with pytest.raises(ValueError, match="4 tokens, but versions"):
        versions({"weight_versions": spans}, 4)


def test_stop_tokens_are_looked_at_only_where_end_tokens_are_not_ignored() -> None:
    def asked(**sampling: Any) -> dict[str, Any]:
        call = Call("r", [1], SamplingParams(max_tokens=2, **sampling), 3, answer=None)  # pyright: ignore[reportArgumentType]
        return body(call, "salt", 64)["sampling_params"]

    assert asked()["ignore_eos"]
    assert not asked(stop_token_ids=(7,))["ignore_eos"]
    assert asked(top_k=5)["top_k"] == 5


def test_log_probs_are_those_after_the_cuts_where_there_are_cuts() -> None:
    def asked(**sampling: Any) -> tuple[bool, int]:
        call = Call("r", [1], SamplingParams(max_tokens=2, **sampling), 3, answer=None)  # pyright: ignore[reportArgumentType]
        found = body(call, "salt", 64)
        return found["return_sampling_mask"], found["sampling_params"]["top_k"]

    assert asked() == (False, -1)
    assert asked(top_k=5) == (True, 5)
    assert asked(top_p=0.9) == (True, 64), "it tells them only up to a number of tokens"
    assert asked(top_p=0.9, top_k=7) == (True, 7)
    assert asked(top_p=0.9, temperature=0.0) == (False, -1), "the likeliest token is cut by nothing"
    told = meta([8, 9]) | {SUPPORT_LOG_PROBS: [-0.25, -0.5]}
    assert added([8, 9], told, 0) == ([8, 9], [-0.25, -0.5])


@pytest.mark.parametrize(
    ("limit", "sampling", "says"),
    [
        (4096, {}, ""), (0, {}, ""), (4096, {"top_p": 0.5}, ""), (4096, {"top_k": 64}, ""),
        (0, {"top_p": 0.5}, "top_p=0.5, top_k=-1: this SGLang tells no log-probs after the cuts"),
        (0, {"top_p": 0.5, "temperature": 0.0}, ""),
        (32, {"top_k": 33}, "for top_k up to 32; lower it, or raise rollout.sglang.engine_kwargs.sampling_mask"),
    ],
)  # fmt: skip
def test_cuts_whose_log_probs_could_not_be_told_are_refused(limit: int, sampling: dict[str, Any], says: str) -> None:
    cuts = Cuts.of({"sampling_mask_max_tokens": limit}, vocab_size=64)
    asked = SamplingParams(max_tokens=1, **sampling)
    if says:
        with pytest.raises(ValueError, match=re.escape(says)):
            cuts.check(asked)
    else:
        cuts.check(asked)


def test_top_p_alone_is_cut_to_half_of_what_a_server_can_tell_if_that_is_not_everything() -> None:
    assert Cuts(4096, vocab_size=64).support == 64
    assert Cuts(4096, vocab_size=151_936).support == 2048


async def test_scores_are_the_last_log_probs_of_the_prompt() -> None:
    def call() -> Call:
        answer = asyncio.get_running_loop().create_future()
        return Call("s", [1, 2, 3, 4], SamplingParams(max_tokens=1), 0, answer, scored=2)

    asked = body(call(), "salt", 64)
    assert (asked["logprob_start_len"], asked["sampling_params"]["max_new_tokens"]) == (1, 1)
    spans = {"weight_versions": [{"version": "4", "start": 0, "end": 1}]}
    told = spans | {"input_token_logprobs": [[None, 2, None], [-0.5, 3, None], [-1.5, 4, None]]}
    done = call()
    done.end_score(told)
    assert (done.answer.result().log_probs, done.answer.result().weight_version) == ([-0.5, -1.5], 4)
    broken = call()
    broken.end_score(spans | {"input_token_logprobs": [[None, 2, None], [None, 3, None], [-1.5, 4, None]]})
    with pytest.raises(FloatingPointError):
        broken.answer.result()
    with pytest.raises(ValueError, match="1 log-probs of 2 tokens"):
        call().end_score(spans | {"input_token_logprobs": [[-1.5, 4, None]]})


def test_every_load_of_weights_has_a_cache_of_its_own() -> None:
    assert new_salt(3) != new_salt(3)
