"""What the LLM servers did between two steps, from the totals that each of them keeps since its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent_loop.llm.protocol import ServerLoad
from streamrl.trainer.step_line import NOTHING_SCORED


@dataclass(slots=True)
class _Sums:
    first_tokens: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    def add(self, load: ServerLoad, before: ServerLoad) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(load, name) - getattr(before, name))


class ServerFigures:
    """Invariant: a request counts once for every server that gave it a first token. A server that is new, or was
    started again, counts from its start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[str, ServerLoad] = {}
        self._sums = _Sums()
        self._rates: list[float] = []
        self._looked = 0.0

    def look(self, loads: Mapping[str, ServerLoad]) -> None:
        now = self._clock()
        seconds, self._looked = now - self._looked, now
        self._rates.clear()
        for server, load in loads.items():
            before = self._last.get(server, NOTHING_SCORED)
            if before.tokens_generated > load.tokens_generated or before.first_tokens > load.first_tokens:
                before = NOTHING_SCORED
            self._sums.add(load, before)
            if server in self._last and seconds > 0:
                self._rates.append((load.tokens_generated - before.tokens_generated) / seconds)
        self._last = dict(loads)

    def step_metrics(self) -> dict[str, float]:
        """Of what was seen since the last call; what is not known is not there."""
        loads, sums, self._sums = self._last.values(), self._sums, _Sums()
        if not loads:
            return {}
        metrics = {
            "rollout/running": float(sum(load.running for load in loads)),
            "rollout/waiting": float(sum(load.waiting for load in loads)),
            "rollout/preemptions": float(sums.preemptions),
            "rollout/cache_usage/max": max(load.cache_usage for load in loads),
            "rollout/weights_age_s/max": max(load.weights_seconds for load in loads),
        }
        if sums.first_tokens:
            metrics["rollout/queue_s"] = sums.queue_seconds / sums.first_tokens
            metrics["rollout/first_token_s"] = sums.first_token_seconds / sums.first_tokens
        if sums.prompt_tokens:
            metrics["rollout/prefix_hits"] = sums.cached_tokens / sums.prompt_tokens
        if self._rates:
            metrics |= {
                "rollout/tokens_per_s/mean": sum(self._rates) / len(self._rates),
                "rollout/tokens_per_s/max": max(self._rates),
                "rollout/tokens_per_s/min": min(self._rates),
            }
        return metrics
