"""What is drawn adds up to what is in the metrics."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from streamrl.dashboard.state.lanes import Sitting, concurrency
from streamrl.dashboard.state.segments import Segment, binned, seconds_by, segments
from streamrl.dashboard.state.timeline import Timeline
from streamrl.monitor.events import read_events
from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.overlap_account import StepRecord, attribute
from streamrl.monitor.schema import CAUSE_OF_SPAN, CAUSES, TRAIN_SPANS
from tests.dashboard.scripted import Scripted


def timeline_of(run: Scripted) -> Timeline:
    timeline = Timeline()
    for event in read_events(run.path):
        timeline.feed(event)
    return timeline


@pytest.mark.parametrize("seed", [random.randrange(1 << 30)])
def test_segments_add_up_to_the_overlap_account(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        spans = [
            Segment(start := chance.uniform(-2, 11), start + chance.expovariate(1.0), what)
            for what in chance.choices([*TRAIN_SPANS, *CAUSE_OF_SPAN.values()], k=chance.randrange(12))
        ]
        waits = {cause: [(s.start, s.end) for s in spans if s.what == cause] for cause in CAUSES}
        record = StepRecord(1, 0.0, 10.0, [(s.start, s.end) for s in spans if s.what in TRAIN_SPANS], waits)
        train, lost = attribute(record)
        parts = segments(0.0, 10.0, spans)
        found = seconds_by(parts)
        assert found["training"] == pytest.approx(train)
        assert {cause: found.get(cause, 0.0) for cause in CAUSES} == pytest.approx(lost)
        assert parts[0].start == 0.0
        assert parts[-1].end == 10.0
        assert all(a.end == b.start for a, b in pairwise(parts))


def test_the_drawn_seconds_of_each_step_are_those_of_its_metrics(tmp_path: Path) -> None:
    run = Scripted(tmp_path)
    run.steps(3, train=0.5, wait_data=0.25, sync=0.1)
    run.steps(3, train=0.2, wait_data=0.7, sync=0.1, idle=0.3)
    rows = {step.step: step.row() for step in timeline_of(run).steps}
    for line in read_metrics(tmp_path):
        row = rows[line["step"]]
        assert row["drawn"]["training"] == pytest.approx(line["overlap/train_s"], rel=0.01)
        for cause in CAUSES:
            assert row["drawn"][cause] == pytest.approx(line[f"lost_s/{cause}"], rel=0.01, abs=1e-6)
        assert row["efficiency"] == pytest.approx(line["overlap/efficiency"], rel=0.01)
        assert row["idle"] == pytest.approx(line["overlap/generation_idle_s"], rel=0.01, abs=1e-6)


def test_a_step_under_way_is_drawn_up_to_now(tmp_path: Path) -> None:
    run = Scripted(tmp_path)
    run.steps(2)
    run.begin("step", step=3)
    run.begin("wait_data", step=3)
    timeline = timeline_of(run)
    window = timeline.window(run.at - 1, run.at + 5, 100, now=run.at + 4)
    trainer = next(lane for lane in window["lanes"] if lane["kind"] == "trainer")
    assert trainer["bars"][-1] == [run.at, run.at + 4, "wait_data"]
    assert timeline.waits_now(run.at + 4) == "wait_data"


def test_an_engines_gap_has_its_cause(tmp_path: Path) -> None:
    run = Scripted(tmp_path)
    run.one_step(train=1.0, idle=0.5)
    with run.trainer.span("wait_credit"):
        run.one_step(train=1.0, idle=0.5)
    run.one_step(train=1.0, idle=0.5)
    engine = next(
        lane for lane in timeline_of(run).window(run.at - 10, run.at, 1000, run.at)["lanes"] if lane["kind"] == "engine"
    )
    assert [what for _, _, what in engine["bars"]] == ["busy", "no_requests", "busy", "no_credit", "busy"]
    assert [version for _, version in engine["versions"]] == [1, 2, 3]


def test_a_call_is_open_until_its_end_or_its_workers(tmp_path: Path) -> None:
    run = Scripted(tmp_path)
    for _ in range(5):
        run.tool(0.3)
    run.tool(None)
    timeline = timeline_of(run)
    (call,) = timeline.calls
    assert (call.tool, call.worker, call.usual) == ("calculator", "agent-0", pytest.approx(0.3))
    timeline.ended("agent-0")
    assert timeline.calls == []


def test_a_step_that_an_exception_ended_is_not_drawn_and_disturbs_no_later_one(tmp_path: Path) -> None:
    run = Scripted(tmp_path)
    run.steps(1)
    with suppress(RuntimeError), run.trainer.span("step", step=2):
        run.span("train", 3.0, step=2)
        raise RuntimeError
    run.at += 5
    run.steps(1, train=0.5)
    timeline = timeline_of(run)
    assert [step.step for step in timeline.steps] == [1, 2]
    assert timeline.steps[-1].drawn["training"] == pytest.approx(0.5)


@pytest.mark.parametrize("seed", [random.randrange(1 << 30)])
def test_concurrency_is_the_mean_number_of_sessions_under_way(seed: int) -> None:
    chance = random.Random(seed)
    sittings = [
        Sitting(start := chance.uniform(-5, 12), start + chance.expovariate(0.5), "", 0, "", 0, 0, 0, 0, 0, None, "")
        for _ in range(100)
    ]
    found = concurrency(sittings, 0.0, 10.0, 37)
    for at, value in enumerate(found):
        left, right = at * 10 / 37, (at + 1) * 10 / 37
        inside = sum(max(0.0, min(s.end, right) - max(s.start, left)) for s in sittings)
        assert value == pytest.approx(inside / (right - left), abs=1e-3)


def test_bars_too_fine_to_be_seen_are_shown_as_what_most_of_a_pixel_was() -> None:
    bars = [Segment(i / 1000, (i + 1) / 1000, "train" if i % 10 < 7 else "wait_data") for i in range(10_000)]
    assert binned(bars, 0.0, 10.0, 100) == [Segment(0.0, pytest.approx(10.0), "train")]
