"""From groups to sessions: who counts, what each scored, and where its advantage goes."""

from __future__ import annotations

import numpy as np
import pytest

from agent_loop.rows import component_tag
from streamrl.algorithms.advantages import estimator
from streamrl.config.sections.algorithm import OverlongBufferConfig
from streamrl.monitor.registry import check_step_metrics
from streamrl.trainer.scores import NoSuchComponent, all_equal, score_metrics, sessions_of
from streamrl.trainer.selection import Selection
from tests.trainer.groups import ready_group
from transfer_queue.net.messages import Group


def test_a_session_of_several_rows_is_one_sample_and_each_of_its_rows_gets_its_advantage():
    sessions = sessions_of([ready_group("u0", [1.0, 0.0], rows=2)])
    assert sessions.scores.tolist() == [1.0, 0.0]
    assert sessions.lengths.tolist() == [8.0, 10.0]
    advantages = sessions.advantages(estimator("grpo"), norm_by_std=False)
    assert advantages == {"u0_0_0": 0.5, "u0_0_1": 0.5, "u0_1_0": -0.5, "u0_1_1": -0.5}


def test_groups_of_different_size_are_compared_within_themselves():
    sessions = sessions_of([ready_group("u0", [1.0, 0.0]), ready_group("u1", [3.0, 3.0, 0.0])])
    advantages = sessions.advantages(estimator("grpo"), norm_by_std=False)
    assert list(advantages.values()) == pytest.approx([0.5, -0.5, 1.0, 1.0, -2.0])


def test_a_greedy_session_is_a_baseline_and_not_trained():
    sessions = sessions_of([ready_group("u0", [1.0, 0.0, 0.25], sampled_sessions=2)])
    assert [row.key for rows in sessions.rows for row in rows] == ["u0_0_0", "u0_1_0"]
    assert sessions.advantages(estimator("remax"), norm_by_std=True) == {"u0_0_0": 0.75, "u0_1_0": -0.25}


def test_the_overlong_punishment_lowers_the_score_over_the_last_tokens_allowed():
    buffer = OverlongBufferConfig(enable=True, len=4, penalty_factor=2.0)
    group = ready_group("u0", [1.0, 1.0, 1.0, 1.0, 1.0], length=6)  # lengths 6 7 8 9 10
    assert sessions_of([group], overlong=buffer, max_response_length=10).scores.tolist() == [1.0, 0.5, 0.0, -0.5, -1.0]
    assert sessions_of([group]).scores.tolist() == [1.0] * 5


def test_a_group_without_a_session_to_train_on_is_an_error():
    with pytest.raises(ValueError, match="u1 has no session"):
        sessions_of([ready_group("u0", [1.0]), ready_group("u1", [1.0], sampled_sessions=0)])


def test_a_group_teaches_nothing_when_its_sampled_sessions_scored_the_same():
    assert all_equal(ready_group("u0", [0.1 + 0.2, 0.3, 0.3]))
    assert all_equal(ready_group("u0", [1.0, 1.0, 0.0], sampled_sessions=2))
    assert not all_equal(ready_group("u0", [1.0, 1.0, 0.0]))
    assert Selection(filter_equal=True).unfit(ready_group("u0", [1.0, 1.0]), 1) == "filtered"
    assert Selection().unfit(ready_group("u0", [1.0, 1.0]), 1) is None


def test_metrics_are_of_the_sampled_sessions():
    metrics = score_metrics([ready_group("u0", [1.0, 0.0, 9.0], sampled_sessions=2)], version=3)
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["rows/trained"] == 2
    assert metrics["training/off_policy/trajectory_staleness/max"] == 2
    assert np.isfinite(list(metrics.values())).all()


def with_components(group: Group, *values: dict[str, float]) -> Group:
    for row in group.rows:
        row.tag.update({component_tag(name): value for name, value in values[int(row.tag["session"])].items()})
    return group


def test_components_of_a_score_are_compared_one_by_one_and_weighed():
    group = with_components(
        ready_group("u0", [9.0, 9.0, 9.0], rows=2),
        {"right": 1.0, "short": 10.0}, {"right": 0.0, "short": 10.0}, {"right": 1.0, "short": 40.0},
    )  # fmt: skip
    sessions = sessions_of([group], components=["right", "short"])
    assert sessions.components is not None
    assert sessions.components.tolist() == [[1.0, 10.0], [0.0, 10.0], [1.0, 40.0]]
    found = sessions.advantages(estimator("gdpo"), norm_by_std=True, weights=[1.0, -2.0])
    # each component has mean 0 and std 1: +-1/sqrt(3) twice, -+2/sqrt(3) once; then the sum is whitened over the batch
    right, short = np.array([1, -2, 1]) / 3**0.5, np.array([-1, -1, 2]) / 3**0.5
    summed = right - 2.0 * short
    assert [found[f"u0_{i}_1"] for i in range(3)] == pytest.approx(summed / summed.std(ddof=1), rel=1e-5, abs=1e-5)
    assert found["u0_2_0"] == found["u0_2_1"]


def test_a_score_without_a_component_that_is_asked_for_is_an_error_with_row_and_name():
    group = with_components(ready_group("u7", [1.0, 1.0]), {"right": 1.0, "short": 1.0}, {"right": 1.0})
    with pytest.raises(NoSuchComponent, match="row u7_1_0: its score has no component 'short'"):
        sessions_of([group], components=["right", "short"])
    assert sessions_of([group]).components is None


def test_a_group_whose_components_differ_teaches_something_though_its_scores_are_the_same():
    group = with_components(ready_group("u0", [1.0, 1.0]), {"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0})
    assert all_equal(group)
    assert not all_equal(group, ["right", "short"])
    same = with_components(ready_group("u0", [1.0, 0.0]), {"right": 1.0}, {"right": 1.0})
    assert Selection(filter_equal=True, components=("right",)).unfit(same, 1) == "filtered"
    assert Selection(filter_equal=True).unfit(same, 1) is None


def test_metrics_tell_the_components():
    group = with_components(ready_group("u0", [1.0, 0.0]), {"right": 1.0}, {"right": 0.5})
    metrics = score_metrics([group], 1, ["right"])
    assert [metrics[f"critic/score/right/{stat}"] for stat in ("mean", "max", "min")] == [0.75, 1.0, 0.5]
    check_step_metrics(metrics)
