"""Users bring their own estimators and losses by `path.py:function`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agent_loop.plugins import PluginError
from streamrl.algorithms.advantages import ADVANTAGE_ESTIMATORS, estimator
from streamrl.algorithms.advantages.estimator import EstimatorError

FILE = """
from streamrl.algorithms.advantages import register_advantage

def halved(scores, group_index, *, lengths):
    return scores / 2 + 0 * lengths

@register_advantage("as_rewarded", per="token", whiten=True)
def as_rewarded(rewards, masks, values, *, gamma):
    return [gamma * r * m for r, m in zip(rewards, masks)], list(values)

number = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "_entries", dict(ADVANTAGE_ESTIMATORS._entries))
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_a_function_in_a_file_says_by_its_arguments_what_it_needs(file: Path) -> None:
    found = estimator(f"{file}:halved")
    assert (found.needs, found.whiten) == ({"lengths"}, False)
    given = {"lengths": np.ones(2), "baselines": np.ones(2), "norm_by_std": False}
    assert found.sessions(np.array([1.0, 3.0]), np.zeros(2, np.int64), **given).tolist() == [0.5, 1.5]


def test_a_function_registered_in_a_file_keeps_what_it_was_registered_with(file: Path) -> None:
    found = estimator(f"{file}:as_rewarded")
    assert (found.per_session, found.whiten, found.needs) == (None, True, {"values"})
    [advantages], _ = found.tokens([np.ones(2)], [np.array([1, 0])], [np.zeros(2)], gamma=0.5, lam=0.9)
    assert advantages.tolist() == [0.5, 0.0]
    assert estimator(found.name) is found


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gaee", "did you mean 'gae'"),
        ("{file}:halve", "has no 'halve'"),
        ("{file}:number", "is 3; expected a function"),
    ],
)
def test_what_is_no_estimator_is_refused_with_what_there_is(file: Path, spec: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        estimator(spec.replace("{file}", str(file)))


@pytest.mark.parametrize(
    "returned", ["None", "3.0", "scores[:1]", "scores[:, None]", "['a', 'b']", "[[1], [1, 2]]", "scores / 0"]
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_what_is_not_one_number_per_session_is_an_error_that_names_the_estimator(tmp_path: Path, returned: str) -> None:
    (tmp_path / "mine.py").write_text(f"def odd(scores, group_index): return {returned}\n")
    with pytest.raises(EstimatorError, match=r"mine.py:odd' should return .* per session; it returned"):
        estimator(f"{tmp_path}/mine.py:odd").sessions(np.ones(2), np.zeros(2, np.int64))


@pytest.mark.parametrize(
    "returned", ["None", "rewards", "(rewards, None)", "(rewards, rewards[:1])", "(rewards, [[1], 2])"]
)
def test_what_is_not_two_arrays_per_row_is_an_error_that_names_the_estimator(file: Path, returned: str) -> None:
    file.write_text(FILE.replace("[gamma * r * m for r, m in zip(rewards, masks)], list(values)", returned))
    found = estimator(f"{file}:as_rewarded")
    with pytest.raises(EstimatorError, match=r"'as_rewarded' should return .* it returned"):
        found.tokens([np.ones(2), np.ones(3)], [np.ones(2), np.ones(3)], [np.ones(2), np.ones(3)])
