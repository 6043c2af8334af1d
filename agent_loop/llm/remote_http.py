"""JSON over HTTP to a service that others use too: it may be busy, it may say when to come back.

consumes  a path, a body and the form of the answer
produces  the answer in that form; RemoteRefused for what will not be better next time, RemoteUnavailable when time is
          up, RemoteInvalid for answers that make no sense
waits for a place among the `concurrency` calls, the service, and between two tries as long as `Backoff` says
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import msgspec

from agent_loop.llm.hiding import Hiding
from agent_loop.llm.keys import ApiKey
from agent_loop.llm.remote_url import remote_url

T = TypeVar("T")

for _name in ("httpx2", "httpcore2"):  # they would log what a service says beside the body, which may be the key
    logging.getLogger(_name).setLevel(logging.WARNING)

BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Answers after which another try may succeed."""

MOST_BYTES = 64 << 20
"""Of any answer, unpacked."""

INVALID_TRIES = 3
"""After so many answers that make no sense the service is taken for one that gives no others."""

_ERROR_BYTES = 1 << 16


class RemoteError(RuntimeError):
    """Base of what a remote model can answer instead of an answer. `status` is 0 where there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class RemoteRefused(RemoteError):
    """The service understood and says no: the request, the key or the model is wrong."""


class RemoteUnavailable(RemoteError, ConnectionError):
    """No answer within the deadline or the tries."""


class RemoteInvalid(RemoteError):
    """Answers, but none in the form that was asked for, or with numbers that cannot be."""


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
    except (ValueError, OverflowError, TypeError, IndexError):  # the last two: dates that are hardly any
        return None


@dataclass(frozen=True, slots=True)
class _Failed:
    """A try after which another one may succeed. `asked`: the seconds until then, by Retry-After."""

    why: str
    asked: float | None = None
    invalid: bool = False


class _Told(msgspec.Struct):
    """What a service may answer with status 200 in place of an answer."""

    error: Any


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
        """`deadline`: seconds of one call with all its tries and waits. Raises ValueError for what is no address."""
        try:
            self.url = remote_url(url)
        except ValueError as error:
            raise ValueError(f"the url of a remote model {error}") from None
        self.retries = 0
        """Tries that failed and were repeated, since the start."""
        self._deadline, self._backoff = deadline, backoff or Backoff()
        self._places, self._concurrency = asyncio.Semaphore(concurrency), concurrency
        self._draw = random.Random(seed).random
        self._shown = Hiding([key.value] if key else [])
        """Through which everything goes that the service says."""
        self._client = httpx2.AsyncClient(
            headers=key.headers if key else {},
            timeout=httpx2.Timeout(None, connect=min(deadline, 10.0)),  # the rest is the call's own deadline
            limits=httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            follow_redirects=False,  # the key goes to this host alone
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def post(self, path: str, body: Mapping[str, Any], answer: type[T], *, most: int = MOST_BYTES) -> T:
        """`answer`: a type that msgspec decodes; `most`: bytes of it. Raises RemoteRefused, RemoteUnavailable,
        RemoteInvalid."""
        ends = asyncio.get_running_loop().time() + self._deadline
        place, tried, invalid, last = self.url + path, 0, 0, ""
        try:
            async with asyncio.timeout_at(ends), self._places:
                for tried in range(1, self._backoff.tries + 1):
                    found = await self._try(path, body, answer, min(most, MOST_BYTES))
                    if not isinstance(found, _Failed):
                        return found
                    last = found.why
                    invalid += found.invalid
                    if invalid == INVALID_TRIES:
                        raise RemoteInvalid(f"{place}: {invalid} answers make no sense; the last: {last}", 200)
                    pause = self._backoff.pause(tried, found.asked, self._draw())
                    if asyncio.get_running_loop().time() + pause > ends:
                        raise RemoteUnavailable(
                            f"{place}: {last}; the next try in {pause:.1f} s would be after the deadline of "
                            f"{self._deadline:g} s"
                        )
                    if tried < self._backoff.tries:
                        self.retries += 1
                        await asyncio.sleep(pause)
        except TimeoutError:
            so_far = f"try {tried} got none" if tried else f"all {self._concurrency} places were taken by other calls"
            so_far += f"; the one before: {last}" if last else ""
            raise RemoteUnavailable(f"{place}: no answer within {self._deadline:g} s; {so_far}") from None
        raise RemoteUnavailable(f"{place}: {tried} tries failed; the last: {last}")

    async def _try(self, path: str, body: Mapping[str, Any], answer: type[T], most: int) -> T | _Failed:
        """Raises RemoteRefused."""
        try:
            async with self._client.stream("POST", self.url + path, json=body) as response:
                status, asked = response.status_code, retry_after(response.headers.get("retry-after"))
                try:
                    raw, whole = await _read(response, most if status == 200 else _ERROR_BYTES)
                except httpx2.DecodingError:
                    raw, whole = b"(it cannot be unpacked)", True
        except httpx2.RequestError as error:
            kind = "no connection" if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) else "no answer"
            return _Failed(f"{kind} ({type(error).__name__}: {self._shown(str(error))})")
        if status != 200:
            return self._no(path, status, self._shown(raw), asked)
        if not whole:
            return _Failed(f"an answer of more than {most} bytes", invalid=True)
        try:
            return msgspec.json.decode(raw, type=answer)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            misfit = self._shown(str(error))
        with contextlib.suppress(ValueError, RecursionError):
            if told := msgspec.json.decode(raw, type=_Told).error:
                code = told.get("code") if isinstance(told, dict) else None
                status = code if isinstance(code, int) and 400 <= code < 600 else 503
                return self._no(path, status, self._shown(raw), asked)
        return _Failed(f"{misfit}; it begins {self._shown(raw, 100)!r}", invalid=True)

    def _no(self, path: str, status: int, said: str, asked: float | None) -> _Failed:
        """Raises RemoteRefused."""
        if status in BUSY:
            return _Failed(f"{status} {said}", asked)
        raise RemoteRefused(f"{self.url}{path} refuses: {status} {said}", status)


async def _read(response: httpx2.Response, most: int) -> tuple[bytes, bool]:
    """The body, unpacked, and whether that is all of it: no more than `most` bytes are kept."""
    raw = bytearray()
    async with contextlib.aclosing(response.aiter_bytes()) as parts:
        async for part in parts:
            raw += part
            if len(raw) > most:
                return bytes(raw[:most]), False
    return bytes(raw), True
