"""GRPO advantages against a reference written from the paper, one group at a time."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.advantages import grpo


def reference(scores: list[float], groups: list[int], *, norm_by_std: bool, eps: float = 1e-6) -> list[float]:
    members: dict[int, list[float]] = {}
    for score, group in zip(scores, groups, strict=True):
        members.setdefault(group, []).append(score)
    found = []
    for score, group in zip(scores, groups, strict=True):
        others = members[group]
        if len(set(others)) == 1:
            found.append(0.0)
            continue
        centred = score - math.fsum(others) / len(others)
        found.append(centred / (statistics.stdev(others) + eps) if norm_by_std else centred)
    return found


scored = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0, 3.0]), st.integers(-3, 3)), min_size=0, max_size=40
)


@given(scored, st.booleans())
def test_each_group_is_normalised_by_itself(rows: list[tuple[float, int]], norm_by_std: bool) -> None:
    scores, groups = [score for score, _ in rows], [group for _, group in rows]
    found = grpo(np.array(scores), np.array(groups, np.int64), norm_by_std=norm_by_std)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, reference(scores, groups, norm_by_std=norm_by_std), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a_group_of_equal_scores_teaches_nothing_even_with_float_residue(norm_by_std: bool) -> None:
    residue = [0.3, 0.1 + 0.2, float(np.float32(0.1) + np.float32(0.2)), 0.3]
    found = grpo(np.array([*residue, 1.0, 1.0]), np.array([0, 0, 0, 0, 1, 1]), norm_by_std=norm_by_std)
    assert found.tolist() == [0.0] * 6


def test_a_lone_session_has_nothing_to_compare() -> None:
    assert grpo(np.array([5.0, 0.0, 1.0]), np.array([7, 2, 2]))[0] == 0.0


def test_one_right_answer_of_eight() -> None:
    found = grpo(np.eye(8)[0], np.zeros(8, np.int64))
    assert found[0] == pytest.approx(0.875 / (math.sqrt(0.125) + 1e-6))
    assert found.sum() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "groups", "message"),
    [
        (np.zeros(3), np.zeros(2, np.int64), "one vector each"),
        (np.array([1.0, np.nan]), np.zeros(2, np.int64), "score 1 is nan"),
    ],
)
def test_what_is_no_score_is_refused(scores: np.ndarray, groups: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grpo(scores, groups)


def test_needs_numpy_only() -> None:
    code = "import sys, streamrl.algorithms.advantages; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
