"""Which tokens are still fit to train on. numpy only."""

from __future__ import annotations

import numpy as np


def token_age(weight_versions: np.ndarray, version: int) -> np.ndarray:
    """i64[R]: version being trained minus the version that sampled the token; 0 for tokens nobody sampled (-1)."""
    versions = np.asarray(weight_versions, dtype=np.int64)
    return np.where(versions < 0, 0, version - versions)


def age_mask(mask: np.ndarray, weight_versions: np.ndarray, *, version: int, max_age: int) -> np.ndarray:
    """`mask` i64[R] without the tokens older than `max_age` versions."""
    return np.where(token_age(weight_versions, version) > max_age, 0, mask)
