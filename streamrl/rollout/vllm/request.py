"""One request in vLLM's terms."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from agent_loop.llm.protocol import Generation, SamplingParams
from agent_loop.seeds import derive_seed
from streamrl.rollout.requests import MIN_TEMPERATURE

TEMPERATURES = (MIN_TEMPERATURE, 2.0)
"""vLLM takes 0, too. It raises a lower one silently, and the log-probs would be those of another temperature."""


@dataclass(slots=True, eq=False)
class Call:
    """One generation. `queue`: where the engine puts its outputs, once it has the request."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    slot: asyncio.Future[None]  # done when it has one, or was aborted without
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    queue: Any = None
    aborted: bool = False
    pieces: int = 0
    """Requests of the engine that it was before; a sleep takes it out."""
    before: int = 0
    """Tokens that it had when the engine got it."""
    retracted: float | None = None
    """Since when it waits again, until the engine has let it go and it has a slot."""
    generation: Generation = field(default_factory=Generation)

    @property
    def engine_id(self) -> str:
        return f"{self.id} +{self.pieces}" if self.pieces else self.id

    def join(self) -> None:
        """It gets a slot, at first or again: the time in between counts as neither waiting nor running."""
        now = time.perf_counter()
        stood = 0.0 if self.retracted is None else now - self.retracted
        self.admitted = now if self.admitted is None else self.admitted + stood


def engine_sampling(call: Call) -> Any:
    """In vLLM's terms. A call that goes on elsewhere has a longer prompt: it must not draw the same numbers again."""
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import SamplingParams as EngineSampling  # pyright: ignore[reportMissingImports]

    asked = call.sampling
    return EngineSampling(
        max_tokens=asked.max_tokens - call.before,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(asked.top_k, 0),
        seed=None if asked.seed is None else derive_seed(asked.seed, len(call.prompt) + call.before),
        stop_token_ids=list(asked.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
