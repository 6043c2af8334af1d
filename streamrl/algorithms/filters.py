"""Which groups are worth training. numpy only."""

from __future__ import annotations

import numpy as np

from streamrl.algorithms.advantages.groups import grouped


def zero_variance(scores: np.ndarray) -> bool:
    """The group's scores f64[n] are all equal up to float residue, hence also those of one session: group-relative
    advantages are 0, and dynamic sampling leaves the group out. A group without sessions has none to tell apart: True.

    Raises ValueError for a score that is not finite.

    Source: DAPO (arXiv:2503.14476), dynamic sampling.
    """
    scores = np.asarray(scores, np.float64)
    return bool(grouped("zero_variance", scores, np.zeros(scores.shape, np.int64)).equal.all())
