"""JSON over HTTP to a service that others use too: it may be busy, it may say when to come back.

consumes  a path and a body
produces  the answer; RemoteRefused for what will not be better next time, RemoteUnavailable when time is up
waits for a place among the `concurrency` calls, the service, and between two tries as long as `Backoff` says
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from agent_loop.llm.keys import ApiKey

BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Answers after which another try may succeed."""
_SHOWN = 300


class RemoteError(RuntimeError):
    """Base of what a remote model can answer instead of an answer. `status` is 0 where there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class RemoteRefused(RemoteError):
    """The service understood and says no: the request, the key or the model is wrong."""


class RemoteUnavailable(RemoteError, ConnectionError):
    """No answer within the deadline or the tries."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait after a failed try, in seconds: what the service asks for, else a random part of a doubling one
    (full jitter: clients that failed together do not come back together)."""

    first: float = 0.5
    longest: float = 30.0
    tries: int = 8

    def pause(self, failed: int, asked: float | None, draw: float) -> float:
        """After the `failed`-th try (from 1). `asked`: by Retry-After; `draw` in [0, 1)."""
        ceiling = min(self.longest, self.first * 2 ** (failed - 1))
        return draw * ceiling if asked is None else asked + draw * self.first


def retry_after(value: str | None, now: Callable[[], float] = time.time) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or a date (RFC 9110, 10.2.3); None if it says nothing."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now())
    except ValueError:
        return None


class RemoteHttp:
    """At most `concurrency` calls at a time; belongs to the event loop on which it is first used."""

    def __init__(
        self,
        url: str,
        *,
        key: ApiKey | None = None,
        concurrency: int = 16,
        deadline: float = 120.0,
        backoff: Backoff | None = None,
        seed: int | None = None,
    ) -> None:
        """`deadline`: seconds of one call with all its tries and waits."""
        self.url = url.rstrip("/")
        self.retries = 0
        """Tries that failed and were repeated, since the start."""
        self._key, self._deadline, self._backoff = key, deadline, backoff or Backoff()
        self._places = asyncio.Semaphore(concurrency)
        self._draw = random.Random(seed).random
        self._client = httpx2.AsyncClient(
            headers=key.headers if key else {},
            timeout=httpx2.Timeout(deadline, connect=min(deadline, 10.0)),
            limits=httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            follow_redirects=False,  # the key goes to this host alone
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RemoteRefused, RemoteUnavailable."""
        ends = asyncio.get_running_loop().time() + self._deadline
        last = "it had no turn"
        try:
            async with asyncio.timeout_at(ends), self._places:
                for failed in range(1, self._backoff.tries + 1):
                    answer = await self._try(path, body)
                    if isinstance(answer, dict):
                        return answer
                    last, asked = answer
                    pause = self._backoff.pause(failed, asked, self._draw())
                    if asyncio.get_running_loop().time() + pause > ends:
                        raise RemoteUnavailable(
                            f"{self.url}{path}: {last}; the next try in {pause:.1f} s would be after the deadline of "
                            f"{self._deadline:g} s"
                        )
                    if failed < self._backoff.tries:
                        self.retries += 1
                        await asyncio.sleep(pause)
        except TimeoutError:
            raise RemoteUnavailable(f"{self.url}{path}: no answer within {self._deadline:g} s; {last}") from None
        raise RemoteUnavailable(f"{self.url}{path}: {self._backoff.tries} tries failed; the last: {last}")

    async def _try(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | tuple[str, float | None]:
        """The answer, or why there is none and when the service asks to come back."""
        try:
            answer = await self._client.post(self.url + path, json=body)
        except httpx2.TransportError as error:
            return f"no connection ({type(error).__name__})", None
        if answer.status_code == 200:
            try:
                found = answer.json()
            except ValueError:
                found = None
            if isinstance(found, dict):
                return found
            return "an answer that is no JSON object", None
        said = f"{answer.status_code} {self._hidden(answer.text[:_SHOWN])}"
        if answer.status_code in BUSY:
            return said, retry_after(answer.headers.get("retry-after"))
        raise RemoteRefused(f"{self.url}{path} refuses: {said}", answer.status_code)

    def _hidden(self, text: str) -> str:
        """A service may repeat the key that it does not like."""
        return text.replace(self._key.value, "***") if self._key else text
