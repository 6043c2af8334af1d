"""Series stay bounded, spikes stay in them, and steps that are done again replace themselves."""

from __future__ import annotations

import math

from streamrl.dashboard.state.series import Series, StepTable, thinned


def test_a_series_stays_bounded_and_keeps_its_newest_half_as_it_came() -> None:
    series = Series(("value",), points=100)
    for i in range(10_000):
        series.add(float(i), float(i % 7))
    assert len(series.rows) <= 100
    assert [row[0] for row in series.rows[-40:]] == [float(i) for i in range(9960, 10_000)]
    assert series.rows == sorted(series.rows)


def test_a_spike_survives_thinning() -> None:
    rows = [(float(i), 1000.0 if i == 617 else 1.0) for i in range(5000)]
    assert (617.0, 1000.0) in thinned(rows, 100)
    assert len(thinned(rows, 100)) <= 100


def test_what_is_taken_is_what_was_added_since_the_last_time() -> None:
    series = Series(("value",))
    series.add(1.0, 5.0)
    assert series.take() == [(1.0, 5.0)]
    series.add(2.0, 6.0)
    series.add(2.0, 6.0)  # the same again is no point
    assert series.take() == [(2.0, 6.0)]
    assert series.take() == []


def test_time_does_not_go_back_where_a_clock_does() -> None:
    series = Series(("value",))
    series.add(5.0, 1.0)
    series.add(4.9, 2.0)
    assert [row[0] for row in series.rows] == [5.0, 5.0]


def test_a_resumed_run_replaces_the_steps_that_it_does_again() -> None:
    table = StepTable()
    for step in range(1, 11):
        table.add(step, {"loss": float(step)})
    table.add(6, {"loss": 60.0})
    assert table.shown(["loss"], 100) == {"step": [1, 2, 3, 4, 5, 6], "loss": [1.0, 2.0, 3.0, 4.0, 5.0, 60.0]}


def test_a_metric_that_comes_and_goes_has_gaps_where_it_was_not() -> None:
    table = StepTable()
    table.add(1, {"a": 1.0})
    table.add(2, {"b": 2.0})
    table.add(3, {"a": 3.0, "b": math.nan})
    assert table.shown(["a", "b"], 100) == {"step": [1, 2, 3], "a": [1.0, None, 3.0], "b": [None, 2.0, None]}
    assert table.last(1) == [{"a": 3.0, "step": 3}]


def test_many_steps_are_shown_as_few() -> None:
    table = StepTable()
    for step in range(10_000):
        table.add(step, {"a": 9.0 if step == 4321 else 0.0, "b": float(step)})
    shown = table.shown(["a", "b"], 200)
    assert len(shown["step"]) <= 200
    assert 9.0 in shown["a"]
    assert shown["step"] == shown["b"]
