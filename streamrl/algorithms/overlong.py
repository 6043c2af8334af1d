"""Length penalties. numpy only."""

from __future__ import annotations

import numpy as np


def overlong_penalty(lengths: np.ndarray, *, max_length: int, buffer: int, penalty_factor: float = 1.0) -> np.ndarray:
    """What is added to the score of answers that come near the limit, f64[N], from 0 down to -penalty_factor.

        0                                                    l <= max_length - buffer
        penalty_factor ((max_length - buffer) - l) / buffer  in between
        -penalty_factor                                      l > max_length

    Args: lengths i64[N], response tokens; max_length, the longest response; buffer, the last tokens of it that cost.

    Raises ValueError: not 0 < buffer <= max_length.

    Source: DAPO (arXiv:2503.14476), eq. 13, soft overlong punishment.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong buffer {buffer} must be above 0 and at most the longest response, {max_length}")
    exceeding = np.asarray(lengths, np.float64) - (max_length - buffer)
    return -penalty_factor * np.clip(exceeding / buffer, 0.0, 1.0)
