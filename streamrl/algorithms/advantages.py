"""Advantages from outcome scores: one scalar per session. numpy only, float64.

The trainer computes them (it sees scores, never tokens); the ranks spread each over the tokens of its session's rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

SAME_SCORE_RTOL = 1e-6
"""Scores of a group that differ by less than this (relative to the largest) are equal: scores travel as float32, and
dividing their residue by its own standard deviation would turn rounding into a full-size advantage."""


def grpo(scores: np.ndarray, group_index: np.ndarray, *, norm_by_std: bool = True, eps: float = 1e-6) -> np.ndarray:
    """Group-relative advantages.

        A_i = (s_i - mean(g_i)) / (std(g_i) + eps)

    with the mean and the unbiased standard deviation of the group's scores. `norm_by_std=False` leaves the division
    out. A group whose scores are all equal, hence also a group of one session, has nothing to compare: 0.

    Args:
        scores: f64[N], one outcome score per session.
        group_index: i64[N], the prompt group of each session; any integers, groups need not be contiguous.

    Returns:
        f64[N].

    Raises:
        ValueError: shapes differ, or a score is not finite.

    Sources: DeepSeekMath (arXiv:2402.03300), outcome supervision; Dr. GRPO (arXiv:2503.20783) for norm_by_std=False.
    """
    scores = np.asarray(scores, dtype=np.float64)
    group_index = np.asarray(group_index)
    if scores.ndim != 1 or scores.shape != group_index.shape:
        raise ValueError(f"grpo: scores {scores.shape} and group_index {group_index.shape} must be one vector each")
    if not np.isfinite(scores).all():
        i = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise ValueError(f"grpo: score {i} is {scores[i]}; a reward must return a finite number")
    if not scores.size:
        return scores
    _, group = np.unique(group_index, return_inverse=True)
    count = np.bincount(group)
    centred = scores - (np.bincount(group, scores) / count)[group]
    centred[_all_equal(scores, group, len(count))[group]] = 0.0
    if not norm_by_std:
        return centred
    std = np.sqrt(np.bincount(group, centred**2) / np.maximum(count - 1, 1))
    return centred / (std + eps)[group]


def _all_equal(scores: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    """bool[groups]: the group's scores are equal up to float residue."""
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, group, scores)
    np.maximum.at(high, group, scores)
    return high - low <= SAME_SCORE_RTOL * np.maximum(np.abs(low), np.abs(high))


ADVANTAGE_ESTIMATORS: dict[str, Callable[..., np.ndarray]] = {"grpo": grpo}
"""`algorithm.adv_estimator`."""
