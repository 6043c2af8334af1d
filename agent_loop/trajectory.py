"""What an agent returns: token ids exactly as sampled, with masks, log-probs and weight versions per token."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

MAX_LOG_PROB = 1e-3
"""Engines round: the log-prob of a certain token may come out a little above 0."""
MAX_LOG_PROB_SIZE = 3e38
"""Log-probs are stored as float32, which is infinite above 3.4e38."""


@dataclass(slots=True)
class Trajectory:
    """One row of a session: P prompt tokens and R response tokens.

    Invariants (checked by `validate`): the four response lists have length R >= 1; a token with mask 1 was sampled by
    the policy and carries its log-prob and version; a token with mask 0 (tool or environment text) has log-prob 0.0
    and version -1.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)
    """Of the prompt, for the LLM server; they are not stored."""
    multi_modal_inputs: dict[str, Any] | None = None
    """What the model's processor made of them: a column of the row."""
    num_turns: int = 0
    score: float | None = None
    """Outcome reward; None = the worker's reward function decides."""
    score_components: dict[str, float] = field(default_factory=dict)
    """Its parts by name, of an agent that sets the score: what a reward function returns beside "score"."""
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Further object columns of the row (tool calls, timings, reward details)."""

    def append_sampled(self, token_ids: list[int], log_probs: list[float], versions: list[int]) -> None:
        """Tokens from the engine: mask 1."""
        self.response_ids += token_ids
        self.response_mask += [1] * len(token_ids)
        self.rollout_log_probs += log_probs
        self.weight_versions += versions

    def append_context(self, token_ids: list[int]) -> None:
        """Tool or environment text: mask 0."""
        self.response_ids += token_ids
        self.response_mask += [0] * len(token_ids)
        self.rollout_log_probs += [0.0] * len(token_ids)
        self.weight_versions += [-1] * len(token_ids)

    def validate(self) -> None:
        """Raise ValueError naming the first broken invariant."""
        n = len(self.response_ids)
        lengths = (len(self.response_mask), len(self.rollout_log_probs), len(self.weight_versions))
        if any(length != n for length in lengths):
            raise ValueError(f"trajectory lists differ in length: response_ids {n}, mask/log-probs/versions {lengths}")
        if not self.prompt_ids:
            raise ValueError("trajectory without prompt tokens")
        if not any(self.response_mask):
            raise ValueError(f"trajectory of {n} response tokens without a sampled one")
        _check_ints("prompt token", self.prompt_ids, 0)
        _check_ints("response token", self.response_ids, 0)
        _check_ints("weight version of response token", self.weight_versions, -1)
        if self._usual():
            return
        for i, (mask, version) in enumerate(zip(self.response_mask, self.weight_versions, strict=True)):
            if mask not in (0, 1) or (mask == 1) != (version >= 0):
                raise ValueError(f"response token {i}: mask {mask} with weight version {version}")
        for i, (mask, log_prob) in enumerate(zip(self.response_mask, self.rollout_log_probs, strict=True)):
            if not -MAX_LOG_PROB_SIZE <= log_prob <= (MAX_LOG_PROB if mask else MAX_LOG_PROB_SIZE):
                raise ValueError(f"response token {i}: log-prob {log_prob}; it must be finite and at most 0")

    def _usual(self) -> bool:
        """Whether masks, versions and log-probs are right, by looks at all of them at once; else each is looked at."""
        if list(self.response_mask) != [version >= 0 for version in self.weight_versions]:
            return False
        low, high = min(self.rollout_log_probs), max(self.rollout_log_probs)
        return low >= -MAX_LOG_PROB_SIZE and high <= MAX_LOG_PROB and not math.isnan(sum(self.rollout_log_probs))


def _check_ints(what: str, values: list[int], least: int) -> None:
    if set(map(type, values)) == {int} and least <= min(values) and max(values) < 2**31:
        return
    for i, value in enumerate(values):
        if not (type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))):
            raise ValueError(f"{what} {i} is {reprlib.repr(value)}, a {type(value).__name__}; it must be an integer")
        if not least <= value < 2**31:
            raise ValueError(f"{what} {i} is {value}; it must be from {least} to 2**31 - 1")
