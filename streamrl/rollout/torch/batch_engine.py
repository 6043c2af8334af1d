"""Continuous batching without threads: requests join and leave between decode steps.

The running requests are always the rows 0..n-1 of the cache, so a decode step works on a contiguous view and gathers
nothing; when a request leaves, the last row moves into its place. Behind the running rows lie kept ones: finished
requests whose prefix a later turn may extend (`prefixes.py`).

    consumes  Request objects (`submit`), one `step()` at a time from whoever owns the engine's thread
    produces  the requests that ended in a step, each with its Generation
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from agent_loop.llm.protocol import Generation, SamplingParams, StopReason
from streamrl.rollout.torch.decoder import Decoder, bytes_per_token
from streamrl.rollout.torch.invariant import InvariantDecoder, sample_rows
from streamrl.rollout.torch.prefixes import PrefixIndex
from streamrl.rollout.torch.sampling import Knobs, sample

PREFILL_TOKENS = 8192
"""Padded tokens computed in one prefill pass: bounds its memory, and the time running requests stand still for it."""

KEPT_BYTES = 256 << 20
"""Cache memory for prefixes of finished requests; at most two per running row."""


@dataclass(slots=True, eq=False)
class Request:
    """One call of `generate`. `cached` counts its tokens in the cache: all but the last sampled one."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    uniforms: list[float]  # one per token to sample
    owner: Any = None
    generation: Generation = field(default_factory=Generation)
    cached: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    suspended: float = 0.0
    """Since when it has had to stand back, if it was running before."""

    @property
    def history(self) -> list[int]:
        """All its tokens: what has to be in the cache before the next one is sampled."""
        return self.prompt + self.generation.token_ids

    def join(self) -> None:
        """It gets a row, at first or again: what it stood back counts as neither waiting nor running."""
        now = time.perf_counter()
        self.admitted = self.admitted + now - self.suspended if self.suspended else now
        self.suspended = 0.0

    def end(self, reason: StopReason) -> None:
        now = self.suspended or time.perf_counter()
        self.generation.stop_reason = reason
        started = self.admitted or now
        self.generation.queue_seconds = started - self.submitted
        self.generation.engine_seconds = now - started


class BatchEngine:
    """Invariants: running requests are rows 0..n-1 with n <= slots; every submitted request is returned exactly once,
    by `step` or `abort`; a token carries the version of the weights it was sampled with. An `invariant` engine gives
    every request the same bits whoever runs beside it; a request that names a version waits for it, and one that names
    none for the newest, if another is served just now."""

    def __init__(
        self, model: nn.Module, *, slots: int, max_len: int, version: int = 0, invariant: bool = False,
        on_first_token: Callable[[float, float], None] = lambda waited, seconds: None,
    ) -> None:  # fmt: skip
        """`on_first_token(waited, seconds)`: of each request, once (`events.Reporter.first_token`)."""
        kept = min(2 * slots, KEPT_BYTES // (bytes_per_token(model) * max_len))
        self.model = model
        self.slots, self.max_len, self.version, self.invariant = slots, max_len, version, invariant
        self.newest = version
        """That requests get which name none. `version`: that the model has just now."""
        self.decoder = (InvariantDecoder if invariant else Decoder)(model, slots + kept, max_len)
        self.prefixes = PrefixIndex(slots, kept, max_len)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.tokens_generated = 0
        self.tokens_prefilled = 0
        self.tokens_reused = 0
        self._on_first_token = on_first_token
        self._knobs: Knobs | None = None  # of the running rows, in order; None after they changed

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """Admit what fits, then sample one token for every running request. Returns those that ended."""
        ended: list[Request] = []
        while len(self.running) < self.slots and self._may_join():
            ended += self._prefill()
        if self.running:
            ended += self._decode()
        return ended

    @property
    def turn(self) -> int | None:
        """The version that waits to be served: the oldest that a waiting request is to get."""
        return min({self._wanted_by(request) for request in self.waiting}, default=None)

    def _wanted_by(self, request: Request) -> int:
        named = request.sampling.weight_version
        return self.newest if named is None else named

    def _may_join(self) -> list[Request]:
        """The waiting requests that these weights may serve; none while an older version waits for its turn."""
        turn = self.turn
        if turn is None or turn < self.version:
            return []
        return [request for request in self.waiting if self._wanted_by(request) == self.version]

    def abort(self, ids: Iterable[str] | None) -> list[Request]:
        """End these (None: all) with the tokens they have."""
        wanted = None if ids is None else set(ids)
        gone = [r for r in self.running if wanted is None or r.id in wanted]
        self._leave([row for row, r in enumerate(self.running) if wanted is None or r.id in wanted])
        gone += [r for r in self.waiting if wanted is None or r.id in wanted]
        self.waiting = deque(r for r in self.waiting if wanted is not None and r.id not in wanted)
        for request in gone:
            request.end("aborted")
        return gone

    def sleep(self) -> None:
        """Give up the cache. Running requests wait, before all others, with the tokens they have."""
        now = time.perf_counter()
        for request in self.running:
            request.suspended, request.cached = now, 0
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self._knobs = None
        self.prefixes.forget_all()
        self.decoder.release()

    def wake_up(self) -> None:
        """The next step computes the cache of who was running again, with the weights of now."""
        self.decoder.allocate()

    def _prefill(self) -> list[Request]:
        """Compute the prompts of some waiting requests in one pass, and sample their first tokens."""
        first = len(self.running)
        fresh = self._choose()
        self.running += fresh
        self._knobs = None
        logits = self._prompt_logits(first, fresh)
        for row, request in enumerate(fresh, first):
            self.prefixes.begin(row, request.history[: request.cached], self.version)
        begin = [request for request in fresh if not request.generation.token_ids]  # the others slept
        ended = self._sample(first, logits, self._knobs_of(fresh))
        now = time.perf_counter()
        for request in begin:
            self._on_first_token(request.admitted - request.submitted, now - request.submitted)
        return ended

    def _choose(self) -> list[Request]:
        """The requests of the next prefill pass, taken from the queue in order and given their cached prefix.

        The first in the queue always goes. Another waits for the next pass if its prompt is in this one (the n samples
        of a group: it will start from the prefix the first leaves), or if over half of the pass would be padding.
        """
        first = len(self.running)
        chosen: list[Request] = []
        prompts: set[tuple[int, ...]] = set()
        widest = real = 0
        for request in self._may_join()[: self.slots - first]:
            prompt = tuple(request.history)
            if prompt in prompts:
                continue
            source, shared = self.prefixes.find(list(prompt), self.version)
            rest = len(prompt) - shared
            padded = max(widest, rest) * (len(chosen) + 1)
            if chosen and (padded > PREFILL_TOKENS or padded > 2 * (real + rest)):
                continue
            self.decoder.copy_row(source, first + len(chosen), shared)
            request.cached = shared
            request.join()
            if rest > 1:  # else all but the last token is cached already, and equal prompts may share the pass
                prompts.add(prompt)
            chosen.append(request)
            widest, real = max(widest, rest), real + rest
        taken = set(map(id, chosen))
        self.waiting = deque(r for r in self.waiting if id(r) not in taken)
        return chosen

    def _prompt_logits(self, first: int, fresh: list[Request]) -> torch.Tensor:
        known = [request.history for request in fresh]
        missing = [tokens[request.cached :] for tokens, request in zip(known, fresh, strict=True)]
        ids = np.zeros((len(fresh), max(map(len, missing))), dtype=np.int64)
        for i, tokens in enumerate(missing):
            ids[i, : len(tokens)] = tokens
        start, count = self._tensor([r.cached for r in fresh]), self._tensor([len(tokens) for tokens in missing])
        longest = max(map(len, known))
        logits = self.decoder.forward(first, torch.from_numpy(ids).to(self.decoder.device), start, count, longest)
        for request, tokens in zip(fresh, known, strict=True):
            self.tokens_reused += request.cached
            self.tokens_prefilled += len(tokens) - request.cached
            request.cached = len(tokens)
        return logits

    def _decode(self) -> list[Request]:
        last = [r.generation.token_ids[-1] for r in self.running]
        start = [r.cached for r in self.running]
        logits = self.decoder.forward(0, self._tensor(last)[:, None], self._tensor(start), None, max(start) + 1)
        self.prefixes.extend(np.asarray(start), np.asarray(last))
        for request in self.running:
            request.cached += 1
        if self._knobs is None:
            self._knobs = self._knobs_of(self.running)
        return self._sample(0, logits, self._knobs)

    def _sample(self, first: int, logits: torch.Tensor, knobs: Knobs) -> list[Request]:
        """One token for each row from `first` on; the requests that ended leave their rows."""
        requests = self.running[first:]
        uniform = [r.uniforms[len(r.generation.token_ids)] for r in requests]
        if self.invariant:
            found = sample_rows(logits, uniform, [r.sampling for r in requests])
        else:
            found = sample(logits, torch.tensor(uniform, device=self.decoder.device), knobs)
        tokens, log_probs = (t.tolist() for t in found)
        self.tokens_generated += len(requests)
        ended: list[int] = []
        for row, (request, token, log_prob) in enumerate(zip(requests, tokens, log_probs, strict=True), first):
            if log_prob != log_prob:
                raise FloatingPointError(
                    f"the model gives NaN at weight version {self.version}: these weights are broken"
                )
            got = request.generation
            got.token_ids.append(token)
            got.log_probs.append(log_prob)
            got.weight_versions.append(self.version)
            if token in request.sampling.stop_token_ids:
                request.end("stop")
                ended.append(row)
            elif len(got.token_ids) == request.sampling.max_tokens:
                request.end("length")
                ended.append(row)
        gone = [self.running[row] for row in ended]
        self._leave(ended)
        return gone

    def _leave(self, rows: list[int]) -> None:
        """Free these rows, keep their prefixes, and close the gaps from the end."""
        for row in reversed(rows):
            request = self.running[row]
            kept = self.prefixes.keep(row, self.version)
            if kept is not None:
                self.decoder.copy_row(row, kept, request.cached)
            last = len(self.running) - 1
            if row != last:
                self.decoder.copy_row(last, row, self.running[last].cached)
                self.prefixes.move(last, row)
                self.running[row] = self.running[last]
            self.prefixes.forget(last)
            self.running.pop()
        if rows:
            self._knobs = None

    def _knobs_of(self, requests: list[Request]) -> Knobs:
        return Knobs.of([r.sampling for r in requests], self.decoder.vocab_size, self.decoder.device)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=self.decoder.device)
