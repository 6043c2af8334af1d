"""Statistics over the sessions of a prompt. They range over all n scores, whatever is masked later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SAME_SCORE_RTOL = 1e-6
"""Scores of a group that differ by less than this (relative to the largest) are equal: scores travel as float32, and
dividing their residue by its own standard deviation would turn rounding into a full-size advantage."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The sessions of one batch, by prompt. N sessions, G groups."""

    scores: np.ndarray
    """f64[N]."""
    group: np.ndarray
    """i64[N], 0 to G - 1."""
    count: np.ndarray
    """i64[G]."""
    equal: np.ndarray
    """bool[G]: nothing to compare, since all scores are equal up to float residue (one session: always)."""

    def mean(self, values: np.ndarray) -> np.ndarray:
        """f64[N]: of each session, the mean of its group."""
        return (np.bincount(self.group, values) / self.count)[self.group]

    def centred(self) -> np.ndarray:
        """f64[N]: score - group mean; exactly 0 in a group of equal scores."""
        return np.where(self.degenerate, 0.0, self.scores - self.mean(self.scores))

    def std(self) -> np.ndarray:
        """f64[N]: of each session, the unbiased standard deviation of its group's scores; one session: 0."""
        squares = np.bincount(self.group, self.centred() ** 2)
        return np.sqrt(squares / np.maximum(self.count - 1, 1))[self.group]

    @property
    def degenerate(self) -> np.ndarray:
        """bool[N]: the session's group has nothing to compare."""
        return self.equal[self.group]


def grouped(estimator: str, scores: np.ndarray, group_index: np.ndarray) -> Groups:
    """Raises ValueError: shapes differ, or a score is not finite. `group_index` i64[N] holds any integers."""
    scores, group_index = np.asarray(scores, dtype=np.float64), np.asarray(group_index)
    if scores.ndim != 1 or scores.shape != group_index.shape:
        raise ValueError(f"{estimator}: scores {scores.shape}, group_index {group_index.shape} must be one vector each")
    finite(estimator, "score", scores)
    _, group, count = np.unique(group_index, return_inverse=True, return_counts=True)
    low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(low, group, scores)
    np.maximum.at(high, group, scores)
    return Groups(scores, group, count, same(low, high))


def same(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """bool: equal up to float residue, element by element."""
    return np.abs(high - low) <= SAME_SCORE_RTOL * np.maximum(np.abs(low), np.abs(high))


def finite(estimator: str, word: str, values: np.ndarray) -> None:
    """Raises ValueError at the first entry (session) that is not finite."""
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        value = values[tuple(bad[0])]
        raise ValueError(f"{estimator}: {word} {int(bad[0][0])} is {value}; a reward must return a finite number")


def per_session(estimator: str, word: str, values: np.ndarray, groups: Groups) -> np.ndarray:
    """`values` as f64[N], one finite number per session. Raises ValueError."""
    values = np.asarray(values, dtype=np.float64)
    if values.shape != groups.scores.shape:
        raise ValueError(f"{estimator}: {len(groups.scores)} sessions but {word}s have shape {values.shape}")
    finite(estimator, word, values)
    return values
