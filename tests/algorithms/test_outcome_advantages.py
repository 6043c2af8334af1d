"""One advantage per session, against references written from the papers, one session at a time."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.advantages import ADVANTAGE_ESTIMATORS, estimator, gdpo, grpo, grpo_passk, opo, remax, rloo

Session = tuple[float, int, float, float, tuple[float, float]]
"""score, group, length, baseline, components."""

SCORES = st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0, 3.0])
SESSIONS = st.lists(
    st.tuples(SCORES, st.integers(-3, 3), st.sampled_from([0.0, 1.0, 7.0, 40.0]), SCORES, st.tuples(SCORES, SCORES)),
    max_size=40,
)


def of_group(sessions: list[Session], group: int) -> list[Session]:
    return [each for each in sessions if each[1] == group]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def normalised(value: float, values: list[float]) -> float:
    if len(set(values)) == 1:
        return 0.0
    return (value - mean(values)) / (statistics.stdev(values) + 1e-6)


def by_grpo(sessions: list[Session]) -> list[float]:
    return [normalised(each[0], [other[0] for other in of_group(sessions, each[1])]) for each in sessions]


def by_dr_grpo(sessions: list[Session]) -> list[float]:
    return [each[0] - mean([other[0] for other in of_group(sessions, each[1])]) for each in sessions]


def by_rloo(sessions: list[Session]) -> list[float]:
    found = []
    for i, each in enumerate(sessions):
        others = [other[0] for j, other in enumerate(sessions) if other[1] == each[1] and j != i]
        found.append(each[0] - mean(others) if others else 0.0)
    return found


def by_remax(sessions: list[Session]) -> list[float]:
    return [each[0] - each[3] for each in sessions]


def by_opo(sessions: list[Session]) -> list[float]:
    found = []
    for each in sessions:
        members = of_group(sessions, each[1])
        length = math.fsum(other[2] for other in members)
        weighted = math.fsum(other[2] * other[0] for other in members)
        baseline = weighted / length if length else mean([other[0] for other in members])
        found.append(0.0 if len({other[0] for other in members}) == 1 else each[0] - baseline)
    return found


def by_gpg(sessions: list[Session]) -> list[float]:
    without_gradient = sum(len({other[0] for other in of_group(sessions, each[1])}) == 1 for each in sessions)
    left = len(sessions) - without_gradient
    return [len(sessions) / left * value if left else 0.0 for value in by_dr_grpo(sessions)]


def by_passk(sessions: list[Session], *, norm_by_std: bool = False) -> list[float]:
    """Leave one out of the maximum; of several equally good ones none is missed."""
    found = []
    for i, each in enumerate(sessions):
        members = [(j, other[0]) for j, other in enumerate(sessions) if other[1] == each[1]]
        others = [score for j, score in members if j != i]
        gain = max(score for _, score in members) - max(others) if others else 0.0
        if norm_by_std and others:
            gain /= statistics.stdev([score for _, score in members]) + 1e-6
        found.append(gain)
    return found


def by_gdpo(sessions: list[Session], weights: tuple[float, float] = (1.0, 1.0)) -> list[float]:
    sums = []
    for each in sessions:
        members = of_group(sessions, each[1])
        sums.append(sum(w * normalised(each[4][k], [m[4][k] for m in members]) for k, w in enumerate(weights)))
    if len(sums) < 2:
        return [0.0] * len(sums)
    return [(value - mean(sums)) / (statistics.stdev(sums) + 1e-6) for value in sums]


CASES: dict[str, tuple[str, dict[str, Any], Callable[[list[Session]], list[float]]]] = {
    "grpo": ("grpo", {}, by_grpo),
    "dr_grpo": ("grpo", {"norm_by_std": False}, by_dr_grpo),
    "rloo": ("rloo", {}, by_rloo),
    "remax": ("remax", {}, by_remax),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}, by_dr_grpo),
    "opo": ("opo", {}, by_opo),
    "gpg": ("gpg", {}, by_gpg),
    "grpo_passk": ("grpo_passk", {"norm_by_std": False}, by_passk),
    "grpo_passk_by_std": ("grpo_passk", {}, lambda sessions: by_passk(sessions, norm_by_std=True)),
    "gdpo": ("gdpo", {}, by_gdpo),
    "gdpo_weighted": ("gdpo", {"weights": [0.25, 2.0]}, lambda sessions: by_gdpo(sessions, (0.25, 2.0))),
}


def estimate(name: str, sessions: list[Session], **settings: Any) -> np.ndarray:
    return estimator(name).sessions(
        np.array([each[0] for each in sessions]),
        np.array([each[1] for each in sessions], np.int64),
        lengths=np.array([each[2] for each in sessions]),
        baselines=np.array([each[3] for each in sessions]),
        components=np.array([each[4] for each in sessions]).reshape(-1, 2),
        **settings,
    )


@pytest.mark.parametrize("case", CASES)
@given(sessions=SESSIONS)
def test_an_estimator_is_what_its_paper_says(case: str, sessions: list[Session]) -> None:
    name, settings, reference = CASES[case]
    found = estimate(name, sessions, **settings)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, reference(sessions), rtol=1e-9, atol=1e-9)


def test_every_estimator_per_session_is_compared_with_a_reference() -> None:
    known = {name for name in ADVANTAGE_ESTIMATORS.names() if estimator(name).per_session}
    assert known == {name for name, _, _ in CASES.values()}


RESIDUE = [0.3, 0.1 + 0.2, float(np.float32(0.1) + np.float32(0.2)), 0.3]
"""Equal but for how they were rounded."""


@pytest.mark.parametrize("case", CASES)
def test_a_group_of_equal_scores_teaches_nothing_even_with_float_residue(case: str) -> None:
    name, settings, _ = CASES[case]
    sessions: list[Session] = [(score, 0, length + 1.0, 0.3, (score, 1.0)) for length, score in enumerate(RESIDUE)]
    sessions += [(1.0, 1, 3.0, 1.0, (0.5, 0.5)), (1.0, 1, 5.0, 1.0, (0.5, 0.5))]
    assert estimate(name, sessions, **settings).tolist() == [0.0] * 6


@pytest.mark.parametrize("case", [case for case in CASES if case != "remax"])
def test_a_lone_session_has_nothing_to_compare(case: str) -> None:
    name, settings, _ = CASES[case]
    found = estimate(name, [(5.0, 7, 3.0, 0.0, (5.0, 1.0))], **settings)
    assert found.tolist() == [0.0]


@pytest.mark.parametrize("case", CASES)
def test_no_sessions_give_no_advantages(case: str) -> None:
    assert estimate(CASES[case][0], []).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("case", CASES)
def test_a_score_that_is_not_finite_is_refused_by_its_session(case: str, bad: float) -> None:
    sessions: list[Session] = [(1.0, 0, 1.0, 0.0, (0.0, 1.0)), (bad, 0, 1.0, 0.0, (1.0, 0.0))]
    with pytest.raises(ValueError, match=f"score 1 is {bad}"):
        estimate(CASES[case][0], sessions)


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_sessions_and_the_numbers_of_groups_do_not_matter(case: str) -> None:
    name, settings, _ = CASES[case]
    rng = np.random.default_rng(5)
    sessions: list[Session] = [
        (rng.normal(), int(rng.integers(4)), float(rng.integers(1, 9)), rng.normal(), (rng.normal(), rng.normal()))
        for _ in range(30)
    ]
    order = rng.permutation(30)
    moved = [(s, 1000 - 7 * g, length, b, c) for s, g, length, b, c in (sessions[i] for i in order)]
    found = estimate(name, sessions, **settings)
    np.testing.assert_allclose(estimate(name, moved, **settings), found[order], rtol=1e-9)


def test_group_statistics_use_all_scores_of_a_group_also_those_of_sessions_without_tokens() -> None:
    """What is masked or rejected later changes `loss_mask`, not what an answer was compared with."""
    found = opo(np.array([1.0, 0.0, 0.0]), np.zeros(3, np.int64), lengths=np.array([0.0, 5.0, 5.0]))
    assert found.tolist() == [1.0, 0.0, 0.0]
    assert rloo(np.array([1.0, 0.0, 0.0]), np.zeros(3, np.int64)).tolist() == [1.0, -0.5, -0.5]


def test_one_right_answer_of_eight() -> None:
    found = grpo(np.eye(8)[0], np.zeros(8, np.int64))
    assert found[0] == pytest.approx(0.875 / (math.sqrt(0.125) + 1e-6))
    assert found.sum() == pytest.approx(0.0, abs=1e-12)


def test_only_the_best_of_a_group_earns_pass_at_k() -> None:
    found = grpo_passk(np.array([0.2, 0.9, 0.5]), np.zeros(3, np.int64), norm_by_std=False)
    np.testing.assert_allclose(found, [0.0, 0.4, 0.0])


def test_two_best_answers_that_differ_by_rounding_earn_nothing_at_pass_at_k() -> None:
    found = grpo_passk(np.array([0.1 + 0.2, 0.0, 0.3]), np.zeros(3, np.int64))
    assert found.tolist() == [0.0] * 3


NO_GROUP = np.zeros(2, np.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grpo(np.zeros(3), NO_GROUP), "one vector each"),
        (lambda: remax(np.zeros(2), NO_GROUP, baselines=np.zeros(3)), "baselines have shape"),
        (lambda: remax(np.zeros(2), NO_GROUP, baselines=np.array([0.0, np.nan])), "baseline 1 is nan"),
        (lambda: opo(np.zeros(2), NO_GROUP, lengths=np.array([1.0, -1.0])), "length 1 is -1"),
        (lambda: gdpo(np.zeros(2), NO_GROUP, components=np.zeros(2)), r"components \[N, K\]"),
        (lambda: gdpo(np.zeros(2), NO_GROUP, components=np.zeros((2, 3)), weights=[1.0]), "3 components but weights"),
        (lambda: gdpo(np.zeros(2), NO_GROUP, components=np.full((2, 1), np.inf)), "components of session 0 is inf"),
        (lambda: estimator("opo").sessions(np.zeros(2), NO_GROUP), "'opo' needs lengths"),
        (lambda: estimator("gae").sessions(np.zeros(2), NO_GROUP), "works on tokens"),
    ],
)
def test_what_cannot_be_estimated_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_needs_numpy_only() -> None:
    code = "import sys, streamrl.algorithms.advantages; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
