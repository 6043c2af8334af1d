"""Advantages to mean 0 and variance 1 over the loss tokens of a set of rows, in two halves.

    moments of this rank's rows ──all-reduce (sum)──► moments of the set ──► whitened rows

so the result depends on the set alone, not on how its rows are split over ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.algorithms.advantages.groups import SAME_SCORE_RTOL

EPS = 1e-8
"""Added to the variance."""


def moments(advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> np.ndarray:
    """f64[3]: count, sum and sum of squares of the values with mask 1. Additive over any split of the rows."""
    found = np.zeros(3, np.float64)
    for values, mask in zip(advantages, masks, strict=True):
        kept = np.asarray(values, np.float64)[np.asarray(mask) > 0]
        found += (len(kept), kept.sum(), np.square(kept).sum())
    return found


def whitened(advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray], moments: np.ndarray) -> list[np.ndarray]:
    """Per row f64[R], 0 where the mask is 0.

        (x - mean) / sqrt(var + 1e-8),  var = sum (x - mean)^2 / (count - 1)

    A set whose values are all equal up to float residue, hence also one value, whitens to 0.

    Source: advantage normalisation as in PPO's implementations; Huang et al., "The 37 Implementation Details of PPO"
    (2022), detail 7, with the mean over sampled tokens.
    """
    count, total, squares = map(float, moments)
    mean = total / max(count, 1.0)
    variance = max(squares - count * mean * mean, 0.0) / max(count - 1.0, 1.0)
    scale = 1.0 / np.sqrt(variance + EPS) if variance > (SAME_SCORE_RTOL * mean) ** 2 else 0.0
    return [
        np.where(np.asarray(mask) > 0, (np.asarray(values, np.float64) - mean) * scale, 0.0)
        for values, mask in zip(advantages, masks, strict=True)
    ]
