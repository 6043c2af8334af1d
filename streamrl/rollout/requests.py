"""What every server checks before it takes a request."""

from __future__ import annotations

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
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        bad = next(token for token in prompt if not 0 <= token < vocab_size)
        raise ValueError(f"prompt token {bad} is outside the model's vocabulary of {vocab_size}; another tokenizer's?")
