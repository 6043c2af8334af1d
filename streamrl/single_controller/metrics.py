"""Metrics that say how they add up, so that nobody has to guess from their names.

A rank returns `{"actor/entropy": Mean(sum_over_its_tokens, its_tokens), "data/bytes_read": Total(4096), ...}`; the
group merges the ranks' into plain floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TINY = 1e-24
"""A product of variances below it is rounding."""


@dataclass(frozen=True, slots=True)
class Mean:
    """total / weight over everything merged; 0.0 where the weights are 0."""

    total: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Total:
    value: float


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest."""

    value: float


@dataclass(frozen=True, slots=True)
class Low:
    """The smallest."""

    value: float


@dataclass(frozen=True, slots=True)
class Spread:
    """The standard deviation of numbers, from how many there are, their sum and that of their squares; of none it is
    0."""

    count: float
    total: float
    squares: float


@dataclass(frozen=True, slots=True)
class Effective:
    """The effective sample size of weights as a share of their number, (sum w)^2 / (n sum w^2); of none it is 0. Kish,
    Survey Sampling (1965)."""

    count: float
    total: float
    squares: float


@dataclass(frozen=True, slots=True)
class Correlation:
    """Pearson's, of pairs: how many there are, the sums of either, of their squares and of their products; where one of
    them never varies it is 0."""

    count: float
    x: float
    y: float
    xx: float
    yy: float
    xy: float


Metric = Mean | Total | Peak | Low | Spread | Effective | Correlation


def is_metrics(value: Any) -> bool:
    """Whether a method's result is a dict of metrics."""
    return isinstance(value, dict) and all(isinstance(item, Metric) for item in value.values())


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """One float per name. Raises TypeError when ranks disagree on the kind of a metric."""
    columns: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            columns.setdefault(name, []).append(metric)
    return {name: _merged(name, metrics) for name, metrics in columns.items()}


def _merged(name: str, metrics: list[Metric]) -> float:
    kinds = {type(metric) for metric in metrics}
    if len(kinds) > 1:
        raise TypeError(f"metric {name}: ranks disagree on its kind: {sorted(kind.__name__ for kind in kinds)}")
    if kinds == {Mean}:
        weight = _sum(metrics, "weight")
        return _sum(metrics, "total") / weight if weight else 0.0
    if kinds <= {Spread, Effective}:
        count, total, squares = (_sum(metrics, part) for part in ("count", "total", "squares"))
        if Effective in kinds:
            return total**2 / (count * squares) if squares else 0.0
        return math.sqrt(max(squares / count - (total / count) ** 2, 0.0)) if count else 0.0
    if kinds == {Correlation}:
        return _correlation(*(_sum(metrics, part) for part in ("count", "x", "y", "xx", "yy", "xy")))
    if kinds == {Total}:
        return _sum(metrics, "value")
    values = [metric.value for metric in metrics if isinstance(metric, Peak | Low)]
    return max(values) if Peak in kinds else min(values)


def _correlation(count: float, x: float, y: float, xx: float, yy: float, xy: float) -> float:
    variances = (xx - x * x / count) * (yy - y * y / count) if count else 0.0
    return (xy - x * y / count) / math.sqrt(variances) if variances > TINY else 0.0


def _sum(metrics: list[Metric], part: str) -> float:
    return math.fsum(getattr(metric, part) for metric in metrics)
