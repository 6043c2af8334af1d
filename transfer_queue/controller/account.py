"""How often the controller was asked for what, how long that took, and what it refused: since this life of it began."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field

from transfer_queue.net.messages import RequestStats

BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Upper bounds of the classes of service times, in seconds; a last class has what took longer."""


@dataclass(slots=True)
class _Kind:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    seconds: float = 0.0
    refused: dict[str, int] = field(default_factory=dict)


class RequestAccount:
    """Invariant: no name here comes from outside, so the account stays as small as the list of messages."""

    def __init__(self) -> None:
        self._kinds: defaultdict[str, _Kind] = defaultdict(_Kind)

    def served(self, kind: str, seconds: float) -> None:
        """One request of that kind (the name of its message) has kept the controller busy for so long. Time for which
        a request waits for others is not in it."""
        one = self._kinds[kind]
        one.counts[bisect_left(BOUNDS, seconds)] += 1
        one.seconds += seconds

    def refused(self, kind: str, code: str) -> None:
        """One was answered by this error (errors.py), also by the end of its wait."""
        codes = self._kinds[kind].refused
        codes[code] = codes.get(code, 0) + 1

    def stats(self) -> dict[str, RequestStats]:
        return {
            kind: RequestStats(counts=list(one.counts), seconds=one.seconds, refused=dict(one.refused))
            for kind, one in sorted(self._kinds.items())
        }
