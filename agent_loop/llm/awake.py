"""Time limits that stand still while the LLM servers sleep: a session that waits for them is not late.

awake = AwakeTime()
async with awake.limit(600.0) as limit:      # as asyncio.timeout: TimeoutError, and limit.expired()
    ...
awake.tell(asleep=True)                      # by whoever hears of the servers: all limits stand
awake.tell(asleep=False)                     # and go on with the seconds that were left
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class AwakeTime:
    """Invariant: a limit expires after its seconds less those between `tell(True)` and `tell(False)`, however often
    either is said."""

    def __init__(self) -> None:
        self.asleep = False
        self._open: set[Limit] = set()
        self._slept = self._fell_asleep = 0.0

    def now(self) -> float:
        """The event loop's clock without the seconds asleep."""
        return (self._fell_asleep if self.asleep else asyncio.get_running_loop().time()) - self._slept

    def limit(self, seconds: float) -> Limit:
        return Limit(self, seconds)

    def tell(self, asleep: bool) -> None:
        if asleep != self.asleep:
            self.asleep = asleep
            now = asyncio.get_running_loop().time()
            if asleep:
                self._fell_asleep = now
            else:
                self._slept += now - self._fell_asleep
            for limit in self._open:
                limit.stand() if asleep else limit.go_on()


_NOT_ENTERED = asyncio.Timeout(None)


class Limit:
    """One `async with`, of one task."""

    def __init__(self, awake: AwakeTime, seconds: float) -> None:
        self._awake, self._left = awake, seconds
        self._timeout = _NOT_ENTERED

    def expired(self) -> bool:
        return self._timeout.expired()

    def stand(self) -> None:
        if not self.expired() and (when := self._timeout.when()) is not None:
            self._left = when - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)

    def go_on(self) -> None:
        if not self.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left)

    async def __aenter__(self) -> Self:
        when = None if self._awake.asleep else asyncio.get_running_loop().time() + self._left
        self._timeout = asyncio.timeout_at(when)
        await self._timeout.__aenter__()
        self._awake._open.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._awake._open.discard(self)
        return await self._timeout.__aexit__(kind, error, trace)
