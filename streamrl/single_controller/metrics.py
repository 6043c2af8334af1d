"""Metrics that say how they add up, so that nobody has to guess from their names.

A rank returns `{"actor/entropy": Mean(sum_over_its_tokens, its_tokens), "data/bytes_read": Total(4096), ...}`; the
group merges the ranks' into plain floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


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


Metric = Mean | Total | Peak


def is_metrics(value: Any) -> bool:
    """Whether a method's result is a dict of metrics."""
    return isinstance(value, dict) and all(isinstance(item, Mean | Total | Peak) for item in value.values())


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """One float per name. Raises TypeError when ranks disagree on the kind of a metric."""
    columns: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            columns.setdefault(name, []).append(metric)
    return {name: _merged(name, metrics) for name, metrics in columns.items()}


def _merged(name: str, metrics: list[Metric]) -> float:
    means = [m for m in metrics if isinstance(m, Mean)]
    totals = [m.value for m in metrics if isinstance(m, Total)]
    peaks = [m.value for m in metrics if isinstance(m, Peak)]
    if len(metrics) not in (len(means), len(totals), len(peaks)):
        raise TypeError(f"metric {name}: ranks disagree on its kind: {sorted({type(m).__name__ for m in metrics})}")
    if means:
        weight = math.fsum(m.weight for m in means)
        return math.fsum(m.total for m in means) / weight if weight else 0.0
    return math.fsum(totals) if totals else max(peaks)
