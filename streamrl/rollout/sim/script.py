"""What a simulated request will do, drawn at once when it arrives: its tokens and the time each of them takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any

import numpy as np

from agent_loop.llm.protocol import SamplingParams
from streamrl.rollout.noise import uniform_array

_NORMAL = NormalDist()
_STREAM_BITS = 48
"""Streams below 2**48 are the requests'; the bits above tell what is drawn: length, time, token ids, log-probs."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Means, and the sigma of a log-normal around them; sigma 0 is a constant.

    A response of drawn length ends with the first stop token of its request. A request without stop tokens never stops
    and takes max_tokens, as a model without an end token would.
    """

    vocab_size: int = 320
    response_tokens_mean: float = 64.0
    response_tokens_sigma: float = 0.0
    long_share: float = 0.0
    """Share of the responses that are `long_times` as long as the others, with the same mean over all."""
    long_times: float = 1.0
    token_seconds: float = 0.01
    token_sigma: float = 0.0
    prefill_seconds: float = 0.0
    update_seconds: float = 0.0
    """How long a weight update stands generation still."""
    die_after_tokens: int | None = None
    """Tokens since the (re)start, over all requests, after which the server dies."""

    @classmethod
    def of(cls, given: Any, **defaults: Any) -> SimConfig:
        """From a mapping, or from the config section (which also names the clock); None is all defaults."""
        if isinstance(given, cls):
            return given
        if given is None:
            return cls(**defaults)
        if isinstance(given, Mapping):
            return cls(**(defaults | dict(given)))
        present = {f.name: getattr(given, f.name) for f in fields(cls) if hasattr(given, f.name)}
        return cls(**(defaults | present))

    def __post_init__(self) -> None:
        seconds = (
            self.token_seconds,
            self.token_sigma,
            self.prefill_seconds,
            self.update_seconds,
            self.response_tokens_sigma,
        )
        if min(seconds) < 0 or self.response_tokens_mean <= 0 or self.vocab_size < 2:
            raise ValueError(f"{self}: times and sigmas must be >= 0, response_tokens_mean > 0, vocab_size >= 2")
        if not 0 <= self.long_share <= 1 or self.long_times <= 0:
            raise ValueError(f"{self}: long_share must be in [0, 1], long_times > 0")


@dataclass(frozen=True, slots=True)
class Script:
    """`seconds[i]`: engine time from getting the slot to token i, ascending. `stops`: the last id is a stop token."""

    token_ids: list[int]
    log_probs: list[float]
    seconds: np.ndarray
    stops: bool


def draw_script(sim: SimConfig, stream: tuple[int, int], prompt_len: int, sampling: SamplingParams) -> Script:
    """Depends on the stream and the prompt's length only. Ids and log-probs belong to absolute positions, as the real
    engine's do; the length is drawn anew by every call, since a simulated model has no memory of why it speaks."""
    stop = sampling.stop_token_ids
    length = sampling.max_tokens
    if stop:
        long = _draw(stream, 5, prompt_len, 1) if sim.long_share else np.ones(1)
        length = int(response_lengths(sim, _draw(stream, 1, prompt_len, 1), long)[0])
    stops = bool(stop) and length <= sampling.max_tokens
    length = min(length, sampling.max_tokens)
    ids = (_draw(stream, 3, prompt_len, length) * sim.vocab_size).astype(np.int64)
    for _ in stop:  # no accidental stop token: each pass moves the ids off one of them at least
        accidental = np.logical_or.reduce([ids == token for token in stop])
        if not accidental.any():
            break
        ids = np.where(accidental, (ids + 1) % sim.vocab_size, ids)
    if stops:
        ids[-1] = stop[0]
    moments = _draw(stream, 2, prompt_len, length) if sim.token_sigma else np.empty(length)
    seconds = log_normal(sim.token_seconds, sim.token_sigma, moments)
    return Script(
        token_ids=ids.tolist(),
        log_probs=(-2.0 * _draw(stream, 4, prompt_len, length)).tolist(),
        seconds=sim.prefill_seconds + np.cumsum(seconds),
        stops=stops,
    )


def response_lengths(sim: SimConfig, uniform: np.ndarray, long: np.ndarray) -> np.ndarray:
    """i64[N]: lengths by two draws each in [0, 1): where in the distribution, and (below `long_share`) whether long."""
    mean = sim.response_tokens_mean / (1 + sim.long_share * (sim.long_times - 1))
    lengths = log_normal(mean, sim.response_tokens_sigma, uniform)
    return np.maximum(1, np.rint(np.where(long < sim.long_share, lengths * sim.long_times, lengths))).astype(np.int64)


def score_script(sim: SimConfig, ids: list[int], response_len: int, temperature: float) -> Script:
    """One moment, after a prefill; the log-probs of the last `response_len` tokens, made of each and the one before."""
    tokens = np.asarray(ids[-response_len - 1 :], dtype=np.int64)
    noise = (tokens[:-1] * 7919 + tokens[1:] * 104729 + 12347) % 65536 / 65536
    return Script([], (-2.0 * noise / temperature).tolist(), np.array([sim.prefill_seconds]), stops=False)


def _draw(stream: tuple[int, int], what: int, start: int, count: int) -> np.ndarray:
    return uniform_array(stream[0], stream[1] + (what << _STREAM_BITS), start, count)


def log_normal(mean: float, sigma: float, uniform: np.ndarray) -> np.ndarray:
    """Values with this mean by inverting the distribution function."""
    if sigma == 0 or mean == 0:
        return np.full(len(uniform), mean)
    z = np.array([_NORMAL.inv_cdf(min(max(u, 1e-9), 1 - 1e-9)) for u in uniform])
    return np.exp(math.log(mean) - sigma**2 / 2 + sigma * z)
