"""The LLM client of one session: counts what generation costs, and never hands out an aborted generation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from agent_loop.llm.fleet import FleetNews
from agent_loop.llm.protocol import Generation, SamplingParams, ServerDied


class RunStopping(ServerDied):
    """The run stops; what this session has so far is not a trajectory."""


class LLMPool(Protocol):
    """LLM servers as a session's client calls them: an LLMClient that also says what a call cost that gave nothing."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        session: str,
        images: Sequence[bytes] = (),
        so_far: Generation | None = None,
        reserved: bool = False,
    ) -> Generation:
        """`so_far` is extended as tokens come in, and is what is returned. It is true also of a call that raises: one
        that was cancelled is aborted on its server first, so that the tokens it had and its slot time are known.
        `reserved`: at one of the servers that are reserved, if there are any."""
        ...

    def reserve(self, servers: Sequence[str]) -> None:
        """From now on these, and no others, are reserved."""
        ...

    def hear(self, news: FleetNews) -> dict[str, tuple[int, int]]:
        """What the manager of the servers tells. By server: requests and tokens of this pool in flight."""
        ...


class MeteredClient:
    """Implements LLMClient. Adds to `metrics`: `generate_seconds` (as the session waits), `queue_seconds` and
    `engine_seconds` (as the engine reports) and `generated_tokens`; also of calls that fail or are cancelled."""

    def __init__(self, llm: LLMPool, metrics: dict[str, float], *, reserved: bool = False) -> None:
        self._llm = llm
        self._metrics = metrics
        self._more: dict[str, Any] = {"reserved": True} if reserved else {}

    async def generate(
        self, prompt_ids: list[int], sampling: SamplingParams, *, session: str, images: Sequence[bytes] = ()
    ) -> Generation:
        clock = asyncio.get_running_loop().time
        begun, so_far = clock(), Generation()
        more = {**self._more, "images": images} if images else self._more
        try:
            generation = await self._llm.generate(prompt_ids, sampling, session=session, so_far=so_far, **more)
        finally:
            self._count(clock() - begun, so_far)
        if generation.stop_reason == "aborted":
            raise RunStopping(f"{session}: generation was aborted because the run stops")
        return generation

    def _count(self, seconds: float, sampled: Generation) -> None:
        costs = {
            "generate_seconds": seconds,
            "queue_seconds": sampled.queue_seconds,
            "engine_seconds": sampled.engine_seconds,
            "generated_tokens": len(sampled.token_ids),
        }
        for name, amount in costs.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + amount
