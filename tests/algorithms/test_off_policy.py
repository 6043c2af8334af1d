"""Ages, length penalties and groups that teach nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from streamrl.algorithms.filters import zero_variance
from streamrl.algorithms.off_policy import age_mask, token_age
from streamrl.algorithms.overlong import overlong_penalty


def test_age_counts_from_the_version_being_trained_and_leaves_context_alone() -> None:
    versions = np.array([-1, 3, 5, 2, -1], np.int32)
    assert token_age(versions, 5).tolist() == [0, 2, 0, 3, 0]
    mask = np.array([0, 1, 1, 1, 0])
    assert age_mask(mask, versions, version=5, max_age=2).tolist() == [0, 1, 1, 0, 0]
    assert age_mask(mask, versions, version=5, max_age=0).tolist() == [0, 0, 1, 0, 0]


def test_a_row_of_which_too_little_is_young_enough_leaves() -> None:
    versions, mask = np.array([1, 1, 5, 5]), np.array([1, 1, 0, 1], np.float32)
    assert age_mask(mask, versions, version=5, max_age=1, min_share=0.3).tolist() == [0, 0, 0, 1]
    assert age_mask(mask, versions, version=5, max_age=1, min_share=0.5).tolist() == [0, 0, 0, 0]
    assert age_mask(mask, versions, version=5, max_age=1).dtype == np.float32


def punishment(length: int, limit: int, cache: int) -> float:
    """DAPO eq. 13."""
    if length <= limit - cache:
        return 0.0
    if length <= limit:
        return ((limit - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("limit", "cache", "factor"), [(20, 4, 1.0), (20, 20, 0.5), (7, 1, 2.0)])
def test_overlong_answers_are_punished_as_in_dapo(limit: int, cache: int, factor: float) -> None:
    lengths = np.arange(0, limit + 5)
    found = overlong_penalty(lengths, max_length=limit, buffer=cache, penalty_factor=factor)
    np.testing.assert_allclose(found, [factor * punishment(int(length), limit, cache) for length in lengths])


@pytest.mark.parametrize("buffer", [0, 21])
def test_a_buffer_that_does_not_fit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(np.zeros(1), max_length=20, buffer=buffer)


@pytest.mark.parametrize(
    ("scores", "teaches_nothing"),
    [
        ([1.0, 1.0, 1.0], True),
        ([0.3, 0.1 + 0.2, float(np.float32(0.3))], True),
        ([0.0, 0.0], True),
        ([0.0, 1e-9], False),
        ([1.0, 1.0, 0.0], False),
        ([0.5], True),
        ([], True),
    ],
)
def test_a_group_of_equal_scores_teaches_nothing(scores: list[float], teaches_nothing: bool) -> None:
    assert zero_variance(np.array(scores)) is teaches_nothing


def test_a_score_that_is_not_finite_is_no_equal_one() -> None:
    with pytest.raises(ValueError, match="score 1 is nan"):
        zero_variance(np.array([1.0, math.nan]))
