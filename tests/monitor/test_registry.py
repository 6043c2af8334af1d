"""The table of metrics: names are unique, follow their systems' rules, and an unknown one is an error."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from streamrl.monitor.overlap import Overlap, StepRecord
from streamrl.monitor.registry import (
    METRICS,
    PROMETHEUS_TABLE,
    STEP_TABLE,
    by_reason_class,
    check_step_metrics,
    expand,
    step_metric,
)


def test_every_name_stands_in_the_table_once() -> None:
    names = Counter(name for metric in METRICS for name in expand(metric.name))
    assert [name for name, count in names.items() if count > 1] == []


def test_prometheus_names_follow_its_rules() -> None:
    for metric in PROMETHEUS_TABLE:
        assert re.fullmatch(r"streamrl_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert "uid" not in metric.labels
        assert metric.help
        assert metric.help.endswith(".")


def test_every_source_is_a_known_step_metric() -> None:
    for metric in PROMETHEUS_TABLE:
        for name in expand(metric.source) if metric.source else ():
            assert step_metric(name) is not None, name


@pytest.mark.parametrize(
    "name",
    [
        "critic/score/mean",
        "lost_s/wait_order",
        "val-core/calculator/reward/mean@1",
        "actor/clip_cov/figure",
        "user/x",
        "training/off_policy/trajectory_staleness_worst/max",
        "groups/dropped/stale",
    ],
)
def test_known_names_pass(name: str) -> None:
    check_step_metrics({name: 1.0})


def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'critic/score/men' \\(nearest: 'critic/score/mean'\\)"):
        check_step_metrics({"critic/score/men": 0.0, "actor/lr": 1.0})


def test_the_metrics_of_the_overlap_account_are_in_the_table() -> None:
    check_step_metrics(Overlap().add(StepRecord(step=1, start=0.0, end=1.0)).metrics())


def test_free_parts_of_a_name_do_not_cross_a_slash() -> None:
    assert step_metric("user/a/b") is None


def test_reasons_are_counted_by_class() -> None:
    assert by_reason_class({"failed: ValueError: x": 2, "failed: y": 1, "stale": 4, "": 1}) == {
        "failed": 3,
        "stale": 4,
        "unknown": 1,
    }


def test_entries_say_what_they_mean() -> None:
    assert all(metric.help for metric in STEP_TABLE)
