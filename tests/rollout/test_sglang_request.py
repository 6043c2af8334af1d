"""What SGLang's answers say of one request."""

from __future__ import annotations

from typing import Any

import pytest

from agent_loop.llm.protocol import SamplingParams
from streamrl.rollout.sglang.request import Call, added, body, new_salt, versions


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
        return body(call, "salt")["sampling_params"]

    assert asked()["ignore_eos"]
    assert not asked(stop_token_ids=(7,))["ignore_eos"]
    assert asked(top_k=5)["top_k"] == 5


def test_every_load_of_weights_has_a_cache_of_its_own() -> None:
    assert new_salt(3) != new_salt(3)
