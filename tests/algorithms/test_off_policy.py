"""Ages of tokens."""

from __future__ import annotations

import numpy as np

from streamrl.algorithms.off_policy import age_mask, token_age


def test_age_counts_from_the_version_being_trained_and_leaves_context_alone() -> None:
    versions = np.array([-1, 3, 5, 2, -1], np.int32)
    assert token_age(versions, 5).tolist() == [0, 2, 0, 3, 0]
    mask = np.array([0, 1, 1, 1, 0])
    assert age_mask(mask, versions, version=5, max_age=2).tolist() == [0, 1, 1, 0, 0]
    assert age_mask(mask, versions, version=5, max_age=0).tolist() == [0, 0, 1, 0, 0]
