"""Thresholds of rollout correction, as a configuration writes them. No imports, so that they are checked early."""

from __future__ import annotations

import math
from dataclasses import dataclass

STATISTICS = (
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
)  # fmt: skip
"""`rollout_rs`."""


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """Keep what has low <= statistic <= high."""

    statistic: str
    low: float
    high: float

    @property
    def scope(self) -> str:
        """token, seq_sum, seq_mean or seq_max."""
        return self.statistic.rpartition("_")[0]

    @property
    def estimator(self) -> str:
        """k1, k2 or k3."""
        return self.statistic.rpartition("_")[2]


def parse_threshold(value: float | str) -> float | tuple[float, float]:
    """`rollout_is_threshold`: a number, or "low_high" → (low, high). Raises ValueError."""
    try:
        if isinstance(value, str) and "_" in value:
            low, high = map(float, value.split("_"))
            if 0 <= low < high < math.inf:
                return low, high
        elif 0 < (number := float(value)) < math.inf:
            return number
    except ValueError:
        pass
    raise ValueError(f"threshold {value!r}: expected a number above 0, or 'low_high' with 0 <= low < high")


def rejection_rules(rollout_rs: str, rollout_rs_threshold: float | str | None) -> tuple[RejectionRule, ...]:
    """`rollout_rs` and `rollout_rs_threshold`, comma lists of the same length, or one threshold for all.

    k1: "low_high" bounds on exp(k1), a ratio; one number means (1/number, number). k2, k3: one upper bound.

    Raises ValueError, with what is known.
    """
    names = [name.strip() for name in rollout_rs.split(",") if name.strip()]
    unknown = [name for name in names if name not in STATISTICS]
    if unknown or not names:
        raise ValueError(f"rollout_rs={rollout_rs!r}: unknown {unknown or 'and empty'}; known: {', '.join(STATISTICS)}")
    if rollout_rs_threshold is None:
        raise ValueError(f"rollout_rs={rollout_rs!r} needs rollout_rs_threshold")
    limits = str(rollout_rs_threshold).split(",")
    if len(limits) not in (1, len(names)):
        raise ValueError(f"rollout_rs names {len(names)} statistics, rollout_rs_threshold has {len(limits)} thresholds")
    return tuple(_rule(name, parse_threshold(limits[i % len(limits)].strip())) for i, name in enumerate(names))


def _rule(name: str, threshold: float | tuple[float, float]) -> RejectionRule:
    if name.endswith("k1"):
        low, high = threshold if isinstance(threshold, tuple) else (1.0 / threshold, threshold)
        if low > high:
            raise ValueError(f"rollout_rs={name}: threshold {threshold} allows no ratio; one number must be at least 1")
        return RejectionRule(name, math.log(low) if low else -math.inf, math.log(high))
    if isinstance(threshold, tuple):
        raise ValueError(f"rollout_rs={name} has an upper bound only: give one number, not {threshold}")
    return RejectionRule(name, -math.inf, threshold)
