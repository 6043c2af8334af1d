"""Numbers over time, and over training steps, in bounded memory."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

POINTS = 4096
"""Rows kept of a time series; older ones get sparser, the newest half stays as it came."""

Row = tuple[float, ...]


class Series:
    """Rows of (time, value, ...). Invariant: times do not go back, and there are at most `points` rows."""

    def __init__(self, columns: Sequence[str], points: int = POINTS) -> None:
        self.columns = tuple(columns)
        self.rows: list[Row] = []
        self.fresh: list[Row] = []
        """Added since the last `take`."""
        self._points = points

    def add(self, time: float, *values: float) -> None:
        """A row; one that is older than the last is put at its time (clocks of two processes differ by a little)."""
        row = (max(time, self.rows[-1][0]) if self.rows else time, *values)
        if self.rows and self.rows[-1] == row:
            return
        self.rows.append(row)
        self.fresh.append(row)
        if len(self.rows) > self._points:
            half = len(self.rows) // 2
            self.rows[:half] = thinned(self.rows[:half], half // 2)

    def take(self) -> list[Row]:
        """The rows added since the last call."""
        fresh, self.fresh = self.fresh, []
        return fresh

    def shown(self, points: int) -> list[Row]:
        """At most about `points` of the rows."""
        return thinned(self.rows, points)


def thinned(rows: Sequence[Row], points: int) -> list[Row]:
    """About `points` of the rows: of each stretch those with the least and the greatest sum, so that spikes stay."""
    if len(rows) <= points or points < 4:
        return list(rows)
    kept: list[Row] = []
    buckets = points // 2
    for i in range(buckets):
        part = rows[i * len(rows) // buckets : (i + 1) * len(rows) // buckets]
        low, high = min(part, key=_height), max(part, key=_height)
        kept += sorted({low, high})
    return kept


def _height(row: Row) -> float:
    return math.fsum(value for value in row[1:] if math.isfinite(value))


class StepTable:
    """The metrics of every step, by column. Invariant: steps increase; a step that comes again (the run was resumed)
    replaces itself and all that followed."""

    def __init__(self) -> None:
        self.steps = array("l")
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    def add(self, step: int, metrics: Mapping[str, object]) -> None:
        self.cut(step)
        self.steps.append(step)
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                column = self._columns.get(name)
                if column is None:
                    column = self._columns[name] = array("d")
                if len(column) < len(self.steps) - 1:
                    column.extend([math.nan] * (len(self.steps) - 1 - len(column)))
                column.append(value)

    def cut(self, step: int) -> None:
        """Forget this step and all later ones."""
        if self.steps and self.steps[-1] >= step:
            at = bisect_left(self.steps, step)
            del self.steps[at:]
            for column in self._columns.values():
                del column[at:]

    def last(self, count: int) -> list[dict[str, float]]:
        """The metrics of the last steps, oldest first, without those that are not numbers."""
        found: list[dict[str, float]] = []
        for at in range(max(0, len(self.steps) - count), len(self.steps)):
            row = {name: column[at] for name, column in self._columns.items() if at < len(column)}
            found.append(
                {name: value for name, value in row.items() if math.isfinite(value)} | {"step": self.steps[at]}
            )
        return found

    def shown(self, names: Iterable[str], points: int) -> dict[str, list[float | None]]:
        """Columns "step" and `names`, thinned together to about `points` steps; None where there is no number."""
        count, chosen = len(self.steps), [name for name in names if name in self._columns]
        places: Sequence[int] = range(count)
        if count > points:
            lead = self._columns[chosen[0]] if chosen else array("d")
            rows = [(float(i), lead[i] if i < len(lead) else 0.0) for i in range(count)]
            places = [int(row[0]) for row in thinned(rows, points)]
        shown: dict[str, list[float | None]] = {"step": [self.steps[i] for i in places]}
        for name in chosen:
            column = self._columns[name]
            shown[name] = [column[i] if i < len(column) and math.isfinite(column[i]) else None for i in places]
        return shown
