"""Which tokens are still fit to train on. numpy only."""

from __future__ import annotations

import numpy as np


def token_age(weight_versions: np.ndarray, version: int) -> np.ndarray:
    """i64[R]: version being trained minus the version that sampled the token; 0 for tokens nobody sampled (-1)."""
    versions = np.asarray(weight_versions, dtype=np.int64)
    return np.where(versions < 0, 0, version - versions)


def age_mask(
    mask: np.ndarray, weight_versions: np.ndarray, *, version: int, max_age: int, min_share: float = 0.0
) -> np.ndarray:
    """`mask` [R] without the tokens older than `max_age` versions; all 0 if less than `min_share` of it remains."""
    kept = np.where(token_age(weight_versions, version) > max_age, np.zeros_like(mask), mask)
    return kept if kept.sum() >= min_share * np.sum(mask) else np.zeros_like(kept)
