"""One request in SGLang's terms: what is asked, and what its answers say."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from agent_loop.llm.protocol import Generation, SamplingParams, Scores, StopReason

SUPPORT_LOG_PROBS = "output_token_sampling_logprobs"
"""Where a chunk has log-probs after the cuts, if they were asked for."""


@dataclass(slots=True, eq=False)
class Call:
    """One generation, or one row to score. `rid`: its name in SGLang, where an id also means all that it begins."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    seed: int
    answer: asyncio.Future[Any]
    scored: int = 0
    """So many tokens at the end of `prompt` are to be scored; nothing that is generated after them means anything."""
    rid: str = ""
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    reader: asyncio.Task[None] | None = None
    generation: Generation = field(default_factory=Generation)

    def end(self, reason: StopReason) -> None:
        got = self.generation
        got.stop_reason = reason
        got.queue_seconds, got.engine_seconds = self._seconds()
        if not self.answer.done():
            self.answer.set_result(got)

    def end_score(self, meta: dict[str, Any]) -> Scores | None:
        """With what its last chunk says; None if nobody waits for it, or the model's numbers are not finite. Raises
        ValueError, KeyError: not of the schema."""
        told = [entry[0] for entry in meta["input_token_logprobs"]][-self.scored :]
        if len(told) != self.scored:
            raise ValueError(f"{len(told)} log-probs of {self.scored} tokens to score")
        if self.answer.done():
            return None
        log_probs = [min(each, 0.0) for each in told if each is not None and not math.isnan(each)]
        if len(log_probs) != self.scored:
            self.answer.set_exception(FloatingPointError("the model gives NaN for tokens to be scored"))
            return None
        scores = Scores(log_probs, versions(meta, 1)[0], *self._seconds())
        self.answer.set_result(scores)
        return scores

    def _seconds(self) -> tuple[float, float]:
        """Waiting for a slot, and holding it."""
        now = time.perf_counter()
        started = now if self.admitted is None else self.admitted
        return started - self.submitted, now - started


def new_salt(version: int) -> str:
    """The key of prefix caches from one load of weights to the next; a number may come again after a resume."""
    return f"weights {version} {uuid.uuid4().hex}"


def added(ids: list[int], meta: dict[str, Any], have: int) -> tuple[list[int], list[float | None]]:
    """(token ids, log-probs) that a chunk adds to `have` tokens, whether it holds all tokens so far or only new ones.
    Raises ValueError, KeyError: not of the schema."""
    count = meta["completion_tokens"] - have
    if count <= 0:
        return [], []
    if SUPPORT_LOG_PROBS in meta:
        log_probs = list(meta[SUPPORT_LOG_PROBS][-count:])
    else:
        log_probs = [entry[0] for entry in meta["output_token_logprobs"][-count:]]
    if len(ids) < count or len(log_probs) != count:
        raise ValueError(f"{count} new tokens, but {len(ids)} ids and {len(log_probs)} log-probs")
    return ids[-count:], log_probs


def versions(meta: dict[str, Any], count: int) -> list[int]:
    """Of each token of a request that ended with `count` of them, as the scheduler stamped them. Raises ValueError."""
    stamped: list[int] = []
    for span in meta["weight_versions"]:
        stamped += [int(span["version"])] * (span["end"] - span["start"])
    if len(stamped) != count:
        raise ValueError(f"{count} tokens, but versions {meta['weight_versions']}")
    return stamped


def version_of(meta: dict[str, Any]) -> int:
    """Of a chunk: as the server said when it sent it, which is before a swap for what was sampled before it."""
    return int(meta["weight_version"])


def cuts(asked: SamplingParams) -> bool:
    """Whether tokens are left out before one is sampled."""
    return asked.temperature > 0 and (asked.top_p < 1.0 or asked.top_k > 0)


def body(call: Call, salt: str, support: int) -> dict[str, Any]:
    """What SGLang is asked. `support`: top_k of one that names none and is cut by top_p, since it tells log-probs after
    the cuts only up to a number of tokens."""
    asked, cut = call.sampling, cuts(call.sampling)
    return {
        "rid": call.rid,
        "input_ids": call.prompt,
        "return_logprob": True,
        "logprob_start_len": len(call.prompt) - call.scored - 1 if call.scored else -1,
        "return_sampling_mask": cut,
        "extra_key": salt,
        "sampling_params": {
            "max_new_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k if asked.top_k > 0 else support if cut else -1,
            "stop_token_ids": list(asked.stop_token_ids),
            "ignore_eos": not asked.stop_token_ids,  # else SGLang looks at no stop token at all
            "sampling_seed": call.seed,
        },
    }
