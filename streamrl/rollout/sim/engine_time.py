"""Time as a simulated engine counts it."""

from __future__ import annotations

import asyncio


def loop_time() -> float:
    return asyncio.get_running_loop().time()


class EngineTime:
    """The loop's time less the times it stood still. Reasons to stand still are counted."""

    def __init__(self) -> None:
        self._stood = self._since = 0.0
        self._reasons = 0

    @property
    def stands(self) -> bool:
        return self._reasons > 0

    def now(self) -> float:
        return (self._since if self._reasons else loop_time()) - self._stood

    def when(self, moment: float) -> float:
        """The loop's time at this moment, if nothing stands still until then."""
        return moment + self._stood

    def stand(self) -> None:
        if not self._reasons:
            self._since = loop_time()
        self._reasons += 1

    def go(self) -> None:
        self._reasons -= 1
        if not self._reasons:
            self._stood += loop_time() - self._since
