"""What went wrong with one request, when that is enough, and how its pieces become one generation."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agent_loop.llm.protocol import Generation, SamplingParams, ServerDied


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the client waits for what, in seconds."""

    healthy: float = 120.0  # for any server to be in service; also for a server that keeps aborting without a token
    answer: float = 600.0  # for one generation or score; a server that is silent for longer counts as dead
    beat: float = 0.5  # between two looks at what open calls have made; a death costs the tokens since the last one
    silent: float = 30.0  # for the answer to such a look; a server that gives none counts as dead
    probe: float = 10.0  # for one health check
    abort: float = 2.0  # for what a cancelled generation had until then; a decode step, or a prefill
    first_pause: float = 0.1  # between health checks, doubling
    longest_pause: float = 5.0
    deaths: int = 8  # servers that may die under one request, with others, before it is given up
    poison: int = 3  # servers that die under one request, the last one under no other suspect: it is to blame


class Setbacks:
    """What went wrong with one request, and when that is enough."""

    def __init__(self, session: str, patience: Patience) -> None:
        self._session = session
        self._patience = patience
        self._deaths = 0
        self._barren_since: float | None = None
        self._pause = patience.first_pause

    def count_death(self, error: ServerDied) -> None:
        self._deaths += 1
        if self._deaths >= self._patience.deaths:
            raise ServerDied(
                f"{self._session}: {self._deaths} servers died under this request; the last: {error}"
            ) from error

    async def pause(self, server: str, *, progress: bool) -> None:
        """After an abort: none if it brought tokens, else growing ones, and ServerDied in the end."""
        if progress:
            self._barren_since, self._pause = None, self._patience.first_pause
            return
        now = asyncio.get_running_loop().time()
        self._barren_since = now if self._barren_since is None else self._barren_since
        if now - self._barren_since > self._patience.healthy:
            raise ServerDied(
                f"{self._session}: server {server} kept aborting for {self._patience.healthy:g} s without a token"
            )
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, self._patience.longest_pause)


def extend(done: Generation, piece: Generation, sampling: SamplingParams) -> None:
    """Append a piece that was checked (answers.py), and set the stop reason of the whole."""
    done.token_ids += piece.token_ids
    done.log_probs += piece.log_probs
    done.weight_versions += piece.weight_versions
    done.queue_seconds += piece.queue_seconds
    done.engine_seconds += piece.engine_seconds
    done.stop_reason = piece.stop_reason
    if piece.stop_reason == "aborted" and piece.token_ids:
        if piece.token_ids[-1] in sampling.stop_token_ids:
            done.stop_reason = "stop"
        elif len(done.token_ids) == sampling.max_tokens:
            done.stop_reason = "length"
