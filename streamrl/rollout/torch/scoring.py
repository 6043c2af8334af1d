"""Log-probs of tokens that another model sampled: one forward pass over whole rows, several rows at a time.

    consumes  ScoreRequest objects (`submit`), one `step()` at a time from whoever owns the engine's thread
    produces  the requests that a step answered, each with its Scores or its error

A pass pads its rows on the right, which a causal model's other positions do not see. Its memory is bounded twice: by
`max_tokens` padded tokens, and by computing the logits of LOGITS_BYTES worth of response tokens at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent_loop.llm.protocol import Scores

SCORE_TOKENS = 8192
"""Padded tokens of one pass; a row that is longer goes alone."""

PADDED = 1.25
"""A pass computes at most so many times its rows' own tokens; more rows in it would cost more than they save."""

LOGITS_BYTES = 128 << 20
"""Of float32 logits at a time: 215 tokens of a vocabulary of 152,000."""


@dataclass(slots=True, eq=False)
class ScoreRequest:
    prompt: list[int]
    response: list[int]
    temperature: float
    owner: asyncio.Future[Scores]
    submitted: float = field(default_factory=time.perf_counter)
    scores: Scores | None = None
    error: Exception | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


class ScoreQueue:
    """Invariants: the row that waits longest is in the next pass; a pass is at most `max_tokens` padded tokens, or one
    row; what its caller gave up is not computed."""

    def __init__(self, model: nn.Module, *, max_tokens: int = SCORE_TOKENS) -> None:
        self._model, self._max_tokens = model, max_tokens
        self.waiting: deque[ScoreRequest] = deque()
        self.rows_scored = 0
        self.tokens_scored = 0
        self.queue_seconds = 0.0

    def submit(self, request: ScoreRequest) -> None:
        self.waiting.append(request)

    def step(self, version: int) -> list[ScoreRequest]:
        """Score some of what waits, in one pass of the model at `version`; they are answered when it returns."""
        chosen = self._choose()
        if not chosen:
            return []
        began = time.perf_counter()
        found = score_rows(self._model, [(r.prompt, r.response, r.temperature) for r in chosen])
        took = time.perf_counter() - began
        for request, log_probs in zip(chosen, found, strict=True):
            if not np.isfinite(log_probs).all():
                request.error = FloatingPointError(
                    f"the model gives log-probs that are not finite for {np.count_nonzero(~np.isfinite(log_probs))} of "
                    f"{len(log_probs)} tokens; its weights are broken, or its dtype is too narrow for them"
                )
                continue
            waited = began - request.submitted
            request.scores = Scores(log_probs.tolist(), version, waited, took)
            self.rows_scored += 1
            self.tokens_scored += len(log_probs)
            self.queue_seconds += waited
        return chosen

    def _choose(self) -> list[ScoreRequest]:
        """The one that waits longest, and those nearest to it in length that fit beside it."""
        waiting = [request for request in self.waiting if not request.owner.done()]  # else given up
        chosen: list[ScoreRequest] = []
        widest = real = 0
        for request in sorted(waiting, key=lambda r: (r is not waiting[0], abs(r.length - waiting[0].length))):
            padded = max(widest, request.length) * (len(chosen) + 1)
            if chosen and (padded > self._max_tokens or padded > PADDED * (real + request.length)):
                break
            chosen.append(request)
            widest, real = max(widest, request.length), real + request.length
        taken = set(map(id, chosen))
        self.waiting = deque(request for request in waiting if id(request) not in taken)
        return chosen


@torch.inference_mode()
def score_rows(model: Any, rows: list[tuple[list[int], list[int], float]]) -> list[np.ndarray]:
    """f32[R] for each (prompt, response, temperature): log softmax(logits / temperature) of its response tokens."""
    head: Tensor = model.lm_head.weight
    ids = np.zeros((len(rows), max(len(prompt) + len(response) for prompt, response, _ in rows)), dtype=np.int64)
    at: list[np.ndarray] = []  # positions whose next token is scored, in the flattened batch
    for i, (prompt, response, _) in enumerate(rows):
        ids[i, : len(prompt) + len(response)] = [*prompt, *response]
        at.append(i * ids.shape[1] + np.arange(len(prompt) - 1, len(prompt) + len(response) - 1))
    tokens = torch.from_numpy(ids).to(head.device)
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
    flat = torch.from_numpy(np.concatenate(at)).to(head.device)
    heat = torch.from_numpy(np.repeat([row[2] for row in rows], [len(row[1]) for row in rows]).astype(np.float32))
    found = torch.cat([
        _log_probs(hidden[where], head, tokens.flatten()[where + 1], t.to(head.device))
        for where, t in zip(*(x.split(max(1, LOGITS_BYTES // (4 * len(head)))) for x in (flat, heat)), strict=True)
    ])  # fmt: skip
    return np.split(found.cpu().numpy(), np.cumsum([len(row[1]) for row in rows])[:-1])


def _log_probs(hidden: Tensor, head: Tensor, wanted: Tensor, temperature: Tensor) -> Tensor:
    """f32[N] of `wanted` [N] from hidden states [N, H]."""
    logits = F.linear(hidden, head).float().div_(temperature[:, None])
    return logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(1)
