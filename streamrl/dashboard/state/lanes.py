"""The timeline: who did what when, kept in bounded memory and shown for any stretch of time at any width."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from streamrl.dashboard.state.segments import Segment, binned

BARS = 100_000
"""Bars kept per lane kind; the oldest leave."""


@dataclass(slots=True)
class Bars:
    """Bars of one lane, by their ends. Invariant: ends do not go back by more than what clocks differ."""

    items: list[Segment] = field(default_factory=list)
    longest: float = 0.0

    def add(self, bar: Segment) -> None:
        self.items.append(bar)
        self.longest = max(self.longest, bar.end - bar.start)
        if len(self.items) > BARS:
            del self.items[: BARS // 4]

    def within(self, start: float, end: float) -> list[Segment]:
        at = bisect_left(self.items, start, key=lambda bar: bar.end)
        found: list[Segment] = []
        for bar in islice(self.items, at, None):
            if bar.start < end:
                found.append(bar)
            elif bar.start > end + self.longest:
                break
        return found


class Sitting(msgspec.Struct, frozen=True, gc=False):
    """A session of an agent worker, as its span tells. (There are many: a dataclass takes three times as long.)"""

    start: float
    end: float
    uid: str
    session: int
    status: str
    tokens: int
    turns: int
    tool_seconds: float
    queue_seconds: float
    engine_seconds: float
    score: float | None
    reason: str


class Sessions:
    """The sessions that ended, by worker, to be shown as how many were under way."""

    def __init__(self) -> None:
        self.by_worker: dict[str, list[Sitting]] = {}
        self._longest: dict[str, float] = {}

    def add(self, worker: str, start: float, end: float, fields: Mapping[str, Any]) -> None:
        score = fields.get("score")
        sittings = self.by_worker.setdefault(worker, [])
        self._longest[worker] = max(self._longest.get(worker, 0.0), end - start)
        sittings.append(
            Sitting(
                start, end, str(fields.get("uid", "")), int(fields.get("session", -1)), str(fields.get("status", "")),
                int(fields.get("tokens", 0)), int(fields.get("turns", 0)), float(fields.get("tool_seconds", 0.0)),
                float(fields.get("queue_seconds", 0.0)), float(fields.get("engine_seconds", 0.0)),
                float(score) if isinstance(score, (int, float)) else None, str(fields.get("reason", "")),
            )
        )  # fmt: skip

        if len(sittings) > BARS:
            del sittings[: BARS // 4]

    def within(self, start: float, end: float) -> dict[str, list[Sitting]]:
        """By worker, those that were under way at some time between the two. They lie by their ends."""
        found: dict[str, list[Sitting]] = {}
        for worker, sittings in self.by_worker.items():
            first = bisect_left(sittings, start, key=lambda s: s.end)
            last = bisect_left(sittings, end + self._longest[worker], key=lambda s: s.end)
            found[worker] = [s for s in sittings[first:last] if s.end > start and s.start < end]
        return found

    def recent(self, count: int) -> list[Sitting]:
        """The last ones of all workers."""
        newest = [s for sittings in self.by_worker.values() for s in sittings[-count:]]
        return sorted(newest, key=lambda s: s.end)[-count:]


def concurrency(sittings: Sequence[Sitting], start: float, end: float, bins: int) -> list[float]:
    """The mean number of sessions under way in each of `bins` equal parts of [start, end)."""
    width = (end - start) / bins
    change = [0.0] * (bins + 2)  # of the slope's steps: whole bins by differences, the cut ones exactly
    partial = [0.0] * (bins + 1)
    for sitting in sittings:
        left, right = max(sitting.start, start), min(sitting.end, end)
        if right <= left:
            continue
        first, last = int((left - start) / width), min(bins - 1, int((right - start) / width))
        if first >= bins:
            continue
        if first == last:
            partial[first] += (right - left) / width
            continue
        partial[first] += (start + (first + 1) * width - left) / width
        partial[last] += (right - start - last * width) / width
        change[first + 1] += 1
        change[last] -= 1
    found: list[float] = []
    whole = 0.0
    for at in range(bins):
        whole += change[at]
        found.append(round(whole + partial[at], 4))
    return found


def drawn(bars: list[Segment], start: float, end: float, width: int) -> list[Segment]:
    """The bars as they are, or where they are too many to be seen one by one, what most of each pixel was."""
    return bars if len(bars) <= 2 * width else binned(bars, start, end, width)
