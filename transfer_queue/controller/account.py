"""How often the controller was asked for what, how long that took, and what it refused: since this life of it began."""

from __future__ import annotations

from bisect import bisect_left

from transfer_queue.net.messages import RequestStats

BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Upper bounds of the classes of service times, in seconds; a last class has what took longer."""


class RequestAccount:
    """Invariant: no name here comes from outside, so the account stays as small as the list of messages."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}
        self._refused: dict[str, dict[str, int]] = {}

    def served(self, kind: str, seconds: float) -> None:
        """One request of that kind (the name of its message) has kept the controller busy for so long. Time for which
        a request waits for others is not in it."""
        counts = self._counts.get(kind)
        if counts is None:
            counts = self._counts[kind] = [0] * (len(BOUNDS) + 1)
        counts[bisect_left(BOUNDS, seconds)] += 1
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def refused(self, kind: str, code: str) -> None:
        """One was answered by this error (errors.py), also by the end of its wait."""
        codes = self._refused.setdefault(kind, {})
        codes[code] = codes.get(code, 0) + 1

    def stats(self) -> dict[str, RequestStats]:
        return {
            kind: RequestStats(
                counts=list(self._counts.get(kind, ())),
                seconds=self._seconds.get(kind, 0.0),
                refused=dict(self._refused.get(kind, {})),
            )
            for kind in sorted(self._counts.keys() | self._refused.keys())
        }
