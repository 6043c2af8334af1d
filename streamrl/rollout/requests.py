"""What every server checks before it takes a request."""

from __future__ import annotations

import math

from agent_loop.llm.protocol import ContextOverflow, SamplingParams


def check_request(prompt: list[int], sampling: SamplingParams, *, max_model_len: int, vocab_size: int) -> None:
    """Raise ContextOverflow or ValueError for a request that the engine could not serve."""
    if not prompt:
        raise ValueError("empty prompt: at least one token is needed to generate from")
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens {sampling.max_tokens}: a call generates at least one token")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        raise ValueError(f"temperature {sampling.temperature} must be >= 0 and top_p {sampling.top_p} in (0, 1]")
    if len(prompt) + sampling.max_tokens > max_model_len:
        raise ContextOverflow(
            f"prompt of {len(prompt)} tokens + max_tokens {sampling.max_tokens} > max_model_len {max_model_len}; "
            "lower max_tokens or shorten the history"
        )
    _check_ids("prompt", prompt, vocab_size)


def check_scored(
    prompt: list[int], response: list[int], temperature: float, *, max_model_len: int, vocab_size: int
) -> None:
    """Raise ContextOverflow or ValueError for tokens whose log-probs the engine could not compute."""
    if not prompt or not response:
        raise ValueError(
            f"{len(prompt)} prompt and {len(response)} response tokens to score: at least one of each is needed"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature {temperature}: log-probs need a finite one above 0")
    if len(prompt) + len(response) > max_model_len:
        raise ContextOverflow(
            f"prompt of {len(prompt)} tokens + response of {len(response)} > max_model_len {max_model_len} of the "
            "server that scores them; raise it, or shorten data.max_response_length"
        )
    _check_ids("prompt", prompt, vocab_size)
    _check_ids("response", response, vocab_size)


def _check_ids(what: str, ids: list[int], vocab_size: int) -> None:
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise ValueError(f"{what} token {bad} is outside the model's vocabulary of {vocab_size}; another tokenizer's?")
