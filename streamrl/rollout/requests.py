"""What every server checks of what it is asked, before anything of it reaches an engine.

An engine serves many callers at once, and an error in it is the end of all their requests: so the types and the ranges
of everything that a caller gives are looked at here. All of it is ValueError, for this caller alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.llm.protocol import ContextOverflow, SamplingParams


class VersionNotServed(ValueError):
    """The weights that a request names cannot be had here. No death of the server, which goes on with all others."""


MIN_TEMPERATURE = 0.01
"""Beside 0. Below, logits divided by it overflow and every probability is NaN."""
MAX_ID = 2**31 - 1
"""Of stop tokens and top_k: engines keep them in 32 bits."""
MAX_NUMBER = 2**63 - 1
"""Of seeds and versions: engines and generators take signed 64-bit integers."""
_INT, _STR = {int}, {str}


def check_request(
    request_id: str, prompt: list[int], sampling: SamplingParams, *, max_model_len: int, vocab_size: int
) -> None:
    """Raise ContextOverflow or ValueError for a request that the engine could not serve."""
    if type(request_id) is not str or not request_id:
        raise ValueError(f"request id {request_id!r}: it is a string that is not empty")
    _check_sequence("prompt", prompt)
    if not prompt:
        raise ValueError("empty prompt: at least one token is needed to generate from")
    check_sampling(sampling)
    if len(prompt) + sampling.max_tokens > max_model_len:
        raise ContextOverflow(
            f"prompt of {len(prompt)} tokens + max_tokens {sampling.max_tokens} > max_model_len {max_model_len}; "
            "lower max_tokens or shorten the history"
        )
    _check_ids("prompt", prompt, vocab_size)


def check_sampling(sampling: SamplingParams) -> None:
    """Raise ValueError for what no engine could sample with."""
    if type(sampling) is not SamplingParams:
        raise ValueError(f"the sampling is a {type(sampling).__name__}; it has to be a SamplingParams")
    if type(sampling.max_tokens) is not int or not 1 <= sampling.max_tokens <= MAX_ID:
        raise ValueError(f"max_tokens {sampling.max_tokens!r}: a call generates at least one token, a whole number")
    temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
    if not _is_number(temperature) or (temperature != 0 and not MIN_TEMPERATURE <= temperature < math.inf):
        raise ValueError(f"temperature {temperature!r}: it has to be 0, or a finite number >= {MIN_TEMPERATURE:g}")
    if not _is_number(top_p) or not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p!r}: it has to be a number in (0, 1]")
    if type(top_k) is not int or not -1 <= top_k <= MAX_ID:
        raise ValueError(f"top_k {top_k!r}: it has to be a whole number >= 1, or -1 for all tokens")
    stop = sampling.stop_token_ids
    if type(stop) is not tuple and type(stop) is not list:
        raise ValueError(f"stop_token_ids {stop!r}: it has to be a tuple of token ids; () for none")
    for token in stop:
        if type(token) is not int or not 0 <= token <= MAX_ID:
            raise ValueError(f"stop_token_ids {stop!r}: {token!r} is no token id")
    if (seed := sampling.seed) is not None and (type(seed) is not int or not 0 <= seed <= MAX_NUMBER):
        raise ValueError(f"seed {seed!r}: it has to be a whole number from 0 to 2**63 - 1, or None")
    if sampling.weight_version is not None:
        _check_version("weight_version", sampling.weight_version)


def check_scored(
    prompt: list[int], response: list[int], temperature: float, *, max_model_len: int, vocab_size: int
) -> None:
    """Raise ContextOverflow or ValueError for tokens whose log-probs the engine could not compute."""
    _check_sequence("prompt", prompt)
    _check_sequence("response", response)
    if not prompt or not response:
        raise ValueError(
            f"{len(prompt)} prompt and {len(response)} response tokens to score: at least one of each is needed"
        )
    if not _is_number(temperature) or not MIN_TEMPERATURE <= temperature < math.inf:
        raise ValueError(f"temperature {temperature!r}: log-probs need a finite one >= {MIN_TEMPERATURE:g}")
    if len(prompt) + len(response) > max_model_len:
        raise ContextOverflow(
            f"prompt of {len(prompt)} tokens + response of {len(response)} > max_model_len {max_model_len} of the "
            "server that scores them; raise it, or shorten data.max_response_length"
        )
    _check_ids("prompt", prompt, vocab_size)
    _check_ids("response", response, vocab_size)


def check_open_ids(request_ids: Sequence[str] | None) -> None:
    """Of `abort`. Raise ValueError unless these are the names of requests, or None."""
    if request_ids is not None:
        _check_sequence("request_ids", request_ids)
        _check_names(request_ids)


def check_progress(have: Mapping[str, int]) -> None:
    """Of `progress`. Raise ValueError unless it says of each request how many of its tokens are known."""
    if not isinstance(have, Mapping):
        raise ValueError(f"progress was asked with a {type(have).__name__}; it takes a dict of request ids and counts")
    _check_names(have)
    if not set(map(type, have.values())) <= _INT or min(have.values(), default=0) < 0:
        raise ValueError(f"progress was asked with {dict(have)!r}; a count of tokens is a whole number >= 0")


def check_weights(path: str, version: int) -> None:
    """Of `update_weights` and of its two phases. Raise ValueError unless these could be a file and its version."""
    if type(path) is not str or not path:
        raise ValueError(f"weights at {path!r}: a path is a string that is not empty")
    _check_version("version", version)


def _check_version(what: str, version: Any) -> None:
    if type(version) is not int or not 0 <= version <= MAX_NUMBER:
        raise ValueError(f"{what} {version!r}: a weight version is a whole number >= 0")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool


def _check_sequence(what: str, given: Any) -> None:
    if not isinstance(given, list | tuple):
        raise ValueError(f"{what} is a {type(given).__name__}; it has to be a list")


def _check_names(names: Any) -> None:
    if not set(map(type, names)) <= _STR:
        bad = next(name for name in names if type(name) is not str)
        raise ValueError(f"request id {bad!r} is a {type(bad).__name__}; ids are strings")


def _check_ids(what: str, ids: Sequence[int], vocab_size: int) -> None:
    if set(map(type, ids)) != _INT:
        bad = next(token for token in ids if type(token) is not int)
        raise ValueError(f"{what} token {bad!r} is a {type(bad).__name__}; token ids are ints (of an array: .tolist())")
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise ValueError(f"{what} token {bad} is outside the model's vocabulary of {vocab_size}; another tokenizer's?")
