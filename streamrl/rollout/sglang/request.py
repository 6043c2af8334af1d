"""One request in SGLang's terms: what is asked, and what its answers say."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from agent_loop.llm.protocol import Generation, SamplingParams, StopReason


@dataclass(slots=True, eq=False)
class Call:
    """One generation. `rid`: its name in SGLang, where an id also means all that it begins."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    seed: int
    answer: asyncio.Future[Generation]
    rid: str = ""
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    reader: asyncio.Task[None] | None = None
    generation: Generation = field(default_factory=Generation)

    def end(self, reason: StopReason) -> None:
        now = time.perf_counter()
        started = now if self.admitted is None else self.admitted
        got = self.generation
        got.stop_reason = reason
        got.queue_seconds, got.engine_seconds = started - self.submitted, now - started
        if not self.answer.done():
            self.answer.set_result(got)


def new_salt(version: int) -> str:
    """The key of prefix caches from one load of weights to the next; a number may come again after a resume."""
    return f"weights {version} {uuid.uuid4().hex}"


def added(ids: list[int], meta: dict[str, Any], have: int) -> tuple[list[int], list[float | None]]:
    """(token ids, log-probs) that a chunk adds to `have` tokens, whether it holds all tokens so far or only new ones.
    Raises ValueError, KeyError: not of the schema."""
    count = meta["completion_tokens"] - have
    if count <= 0:
        return [], []
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


def body(call: Call, salt: str) -> dict[str, Any]:
    """What SGLang is asked."""
    asked = call.sampling
    return {
        "rid": call.rid,
        "input_ids": call.prompt,
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": salt,
        "sampling_params": {
            "max_new_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k if asked.top_k > 0 else -1,
            "stop_token_ids": list(asked.stop_token_ids),
            "ignore_eos": not asked.stop_token_ids,  # else SGLang looks at no stop token at all
            "sampling_seed": call.seed,
        },
    }
