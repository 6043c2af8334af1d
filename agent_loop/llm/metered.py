"""The LLM client of one session: counts what generation costs, and never hands out an aborted generation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agent_loop.llm.protocol import Generation, LLMClient, SamplingParams, ServerDied


class RunStopping(ServerDied):
    """The run stops; what this session has so far is not a trajectory."""


class MeteredClient:
    """Implements LLMClient. Adds to `metrics`: `generate_seconds` (as the session waits), `queue_seconds` and
    `engine_seconds` (as the engine reports) and `generated_tokens`."""

    def __init__(self, llm: LLMClient, metrics: dict[str, float]) -> None:
        self._llm = llm
        self._metrics = metrics

    async def generate(
        self, prompt_ids: list[int], sampling: SamplingParams, *, session: str, images: Sequence[bytes] = ()
    ) -> Generation:
        clock = asyncio.get_running_loop().time
        begun = clock()
        shown = {"images": images} if images else {}
        generation = await self._llm.generate(prompt_ids, sampling, session=session, **shown)
        if generation.stop_reason == "aborted":
            raise RunStopping(f"{session}: generation was aborted because the run stops")
        costs = {
            "generate_seconds": clock() - begun,
            "queue_seconds": generation.queue_seconds,
            "engine_seconds": generation.engine_seconds,
            "generated_tokens": len(generation.token_ids),
        }
        for name, amount in costs.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + amount
        return generation
