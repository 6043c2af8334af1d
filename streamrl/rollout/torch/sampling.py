"""Batched sampling of one token per row, with log-probs and seeds that do not depend on the batch.

A row's randomness is one uniform number per token, a pure function of (seed, absolute position of the token), see
`noise.py`. So a request gives the same tokens whoever shares its batch,
and one that was aborted and continues elsewhere with the same seed, its tokens now part of the prompt, goes on as if
nothing had happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agent_loop.llm.protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class Knobs:
    """The sampling parameters of a batch as tensors [B]; None where no row needs it."""

    temperature: Tensor  # 1.0 for greedy rows
    greedy: Tensor | None  # bool
    top_k: Tensor | None
    top_p: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Knobs:
        greedy = [row.temperature == 0 for row in rows]
        top_k = [row.top_k if row.top_k > 0 else vocab_size for row in rows]
        top_p = [row.top_p for row in rows]
        return cls(
            temperature=torch.tensor([row.temperature or 1.0 for row in rows], device=device)[:, None],
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k=torch.tensor(top_k, device=device) if min(top_k) < vocab_size else None,
            top_p=torch.tensor(top_p, device=device) if min(top_p) < 1.0 else None,
        )


def sample(logits: Tensor, uniform: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor]:
    """(tokens [B], log-probs [B]) from logits [B, V] float32 and uniform [B] in [0, 1).

    The log-prob is that of the distribution sampled from: after temperature, top-k and top-p. A greedy row (temperature
    0) reports the log-prob at temperature 1.
    """
    logits = logits / knobs.temperature
    if knobs.top_k is not None or knobs.top_p is not None:
        logits = _cut(logits, knobs.top_k, knobs.top_p)
    log_probs = torch.log_softmax(logits, -1)
    cumulative = log_probs.exp().cumsum_(-1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that the first entry above it is always a token with some probability.
    threshold = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    if knobs.greedy is not None:
        tokens = torch.where(knobs.greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    tokens.clamp_(max=logits.shape[-1] - 1)  # only NaN logits get here; the caller finds the NaN log-prob
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]


def _cut(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """-inf outside the k most probable tokens and then outside the smallest set of mass >= p; the best token stays."""
    ordered, order = logits.sort(stable=True, dim=-1, descending=True)
    if top_k is not None:
        rank = torch.arange(logits.shape[-1], device=logits.device)
        ordered = ordered.masked_fill(rank >= top_k[:, None], -torch.inf)
    if top_p is not None:
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        outside = before >= top_p[:, None]
        outside[:, 0] = False
        ordered = ordered.masked_fill(outside, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)
