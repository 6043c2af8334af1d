"""The overlap account: every second is counted once, and the bound is the one of the formula."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.monitor.events import Event, EventLog, read_events
from streamrl.monitor.overlap import Overlap, OverlapCollector, StepRecord
from streamrl.monitor.overlap_account import PRECEDENCE, attribute, length
from streamrl.monitor.schema import CAUSES, check_events

times = st.floats(0.0, 100.0, allow_nan=False)
intervals = st.lists(st.tuples(times, times).map(lambda ab: (min(ab), max(ab))), max_size=6)
records = st.builds(
    StepRecord,
    step=st.integers(1, 100),
    start=st.floats(0.0, 40.0),
    end=st.floats(40.0, 100.0),
    train=intervals,
    waits=st.dictionaries(st.sampled_from(PRECEDENCE), intervals),
    sync_seconds=st.floats(0, 10),
    generation_busy=st.floats(0, 100),
    engines=st.integers(0, 4),
    slots=st.integers(0, 64),
    slot_seconds=st.floats(0, 1000),
    sessions=st.integers(0, 128),
    samples=st.integers(0, 128),
    groups=st.integers(0, 16),
    groups_dropped=st.integers(0, 16),
)


@given(st.lists(records, min_size=1, max_size=8))
def test_training_and_losses_add_up_to_the_whole(steps: list[StepRecord]) -> None:
    overlap = Overlap()
    for record in steps:
        account = overlap.add(record)
        assert set(account.lost) == set(CAUSES)
        assert min(account.lost.values()) >= 0.0
        assert account.t_train + sum(account.lost.values()) == pytest.approx(record.end - record.start)
    run = overlap.run
    assert run.train_busy + sum(run.lost.values()) == pytest.approx(run.seconds)
    assert run.seconds == pytest.approx(sum(record.end - record.start for record in steps))


def test_overlapping_causes_are_counted_once_and_training_wins() -> None:
    train, lost = attribute(
        StepRecord(
            step=1,
            start=0.0,
            end=10.0,
            train=[(2.0, 5.0), (4.0, 6.0), (9.0, 12.0)],
            waits={"wait_data": [(-1.0, 3.0)], "sync": [(1.0, 8.0)], "wait_order": [(1.0, 1.5)]},
        )
    )
    assert train == 5.0
    assert lost["wait_order"] == 0.5
    assert lost["wait_data"] == 1.5  # 0-1 and 1.5-2; before 0 is another step's
    assert lost["sync"] == 2.0  # 6-8: the rest lies under training and waiting
    assert lost["unaccounted"] == 1.0


def test_length_is_that_of_the_union() -> None:
    assert length([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.0, 1.5)]) == 4.0


def test_the_bound_is_the_slower_side() -> None:
    base = StepRecord(step=1, start=0.0, end=20.0, train=[(0.0, 8.0)], waits={"sync": [(8.0, 10.0)]}, sync_seconds=4.0)
    trained = Overlap().add(base)
    assert (trained.bound, trained.efficiency) == (10.0, 0.5)  # T_train 8 + the 2 of 4 sync seconds it stood still
    generated = Overlap().add(
        replace(
            base,
            slots=8,
            slot_seconds=64.0,
            sessions=32,
            samples=32,
            groups=4,
            groups_dropped=1,
            generation_stalled=1.0,
        )
    )
    assert generated.t_gen == pytest.approx(32 * 2.0 / (8 * 0.8))  # N·μ / (K·(1−q))
    assert generated.bound == pytest.approx(11.0)
    assert generated.t_sync == 4.0


def test_a_step_without_finished_sessions_uses_the_mean_slot_time_known() -> None:
    overlap = Overlap()
    overlap.add(StepRecord(step=1, start=0, end=4, slots=4, slot_seconds=8.0, sessions=4, samples=4))
    assert overlap.add(StepRecord(step=2, start=4, end=8, slots=4, samples=4)).t_gen == 2.0


def test_steady_efficiency_leaves_out_the_filling_of_the_pipeline() -> None:
    overlap = Overlap()
    overlap.add(StepRecord(step=1, start=0.0, end=30.0, train=[(29.0, 30.0)]))
    for k in range(1, 60):
        overlap.add(StepRecord(step=k + 1, start=29.0 + k, end=30.0 + k, train=[(29.0 + k, 30.0 + k)]))
    assert overlap.run.steady_efficiency == pytest.approx(1.0)
    assert overlap.run.efficiency == pytest.approx(60 / 89)


def test_a_step_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match="before its start"):
        Overlap().add(StepRecord(step=1, start=2.0, end=1.0))


def run_two_steps(run_dir: Path) -> None:
    """Trainer: waits 1 s, trains 2 s, publishes 0.5 s, 0.5 s of nothing, twice. One server with 4 slots, half busy."""
    log = EventLog(run_dir / "events", "trainer", clock=lambda: 0.0)
    agent = EventLog(run_dir / "events", "agent-0", clock=lambda: 0.0)
    for step in (1, 2):
        t = 4.0 * step
        log.span_at("wait_data", t, t + 1, step=step)
        for session in range(8):
            agent.span_at(
                "session",
                t,
                t + 1,
                partition="train",
                uid=f"p{step}",
                session=session,
                status="success",
                engine_seconds=1.0,
            )
        agent.span_at("session", t, t + 1, partition="val", uid="v", session=0, status="success", engine_seconds=99.0)
        log.span_at("train", t + 1, t + 3, step=step)
        log.span_at("publish", t + 3, t + 3.5, version=step)
        for name, value in (("server_slots", 4), ("server_busy_seconds", 2.0 * step)):
            log.write(event(name, t + 3.9, value))
        log.span_at("step", t, t + 4, step=step, groups=2, samples=8, dropped=0)


def event(name: str, at: float, value: float) -> Event:
    return Event("counter", name, at, value=value, fields={"server": "s0"})


def test_the_collector_makes_the_account_out_of_the_event_log(tmp_path: Path) -> None:
    run_two_steps(tmp_path)
    collector = OverlapCollector()
    metrics = collector.feed_all(read_events(tmp_path))
    assert metrics["lost_s/wait_data"] == pytest.approx(1.0)
    assert metrics["lost_s/sync"] == pytest.approx(0.5)
    assert metrics["lost_s/unaccounted"] == pytest.approx(0.5)
    assert metrics["overlap/gen_s"] == pytest.approx(8 * 1.0 / 4)
    assert metrics["overlap/efficiency"] == pytest.approx(2.5 / 4)
    assert metrics["overlap/generation_busy_s"] == pytest.approx(2.0)
    assert collector.run.steps == 2
    assert collector.run.train_busy == pytest.approx(4.0)


def test_cancelled_sessions_count_for_the_bound_with_the_slot_time_they_held() -> None:
    def session(status: str, engine_seconds: float) -> Event:
        fields = {"partition": "train", "uid": "p", "session": 0, "status": status, "engine_seconds": engine_seconds}
        return Event("span", "session", 0.0, 1.0, fields=fields, process="agents-0")

    collector = OverlapCollector()
    collector.feed_all([event("server_slots", 0.0, 4), event("server_busy_seconds", 0.0, 0.0)])
    for _ in range(8):
        collector.feed(session("success", 2.0))
        collector.feed(session("cancelled", 1.0))
    step = {"step": 1, "groups": 2, "samples": 8, "dropped": 2}
    found = collector.feed(Event("span", "step", 0.0, 10.0, fields=step, process="trainer"))
    assert found is not None
    assert found.t_gen == pytest.approx((8 * 2.0 + 8 * 1.0) / 4), "all slot time, that of those thrown away too"


def test_a_step_that_was_cut_short_and_a_publish_before_the_first_step_do_not_count(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events", "trainer", clock=lambda: 0.0)
    log.span_at("publish", 0.0, 5.0, version=0)
    log.span_at("step", 6.0, 8.0, step=1, groups=1, samples=1, dropped=0)
    log.span_at("step", 8.0, 60.0, step=2, error="CancelledError")
    collector = OverlapCollector()
    assert collector.feed_all(read_events(tmp_path))["overlap/sync_s"] == 0.0
    assert (collector.run.steps, collector.run.seconds) == (1, 2.0)
    assert check_events(read_events(tmp_path)) == 4


def test_the_cpu_bound_is_what_all_processes_took_since_the_last_reading_by_cores(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events", "trainer", clock=lambda: 0.0)
    log.counter("cpu_seconds", 30.0, cores=2)  # until training began
    for step, taken in ((1, 36.0), (2, 37.0)):
        log.counter("cpu_seconds", taken, cores=2)
        log.span_at("step", 4.0 * step, 4.0 * step + 4, step=step, groups=1, samples=1, dropped=0)
    collector = OverlapCollector()
    assert collector.feed_all(read_events(tmp_path))["overlap/cpu_bound_s"] == pytest.approx(0.5)
    assert collector.run.cpu_bound == pytest.approx(3.5)
    assert collector.run.summary_fields()["cpu_bound_seconds"] == pytest.approx(3.5)
    assert check_events(read_events(tmp_path)) == 6


def test_the_steady_step_leaves_out_the_warm_up_and_its_losses_add_up() -> None:
    overlap = Overlap()
    for step in range(30):
        slow = 10.0 if step < 10 else 2.0
        overlap.add(StepRecord(step=step, start=0.0, end=slow, train=[(0.0, 1.0)], waits={"wait_data": [(1.0, slow)]}))
    steady = overlap.steady
    assert steady.seconds == pytest.approx(2.0)
    assert steady.efficiency == pytest.approx(0.5)
    assert steady.t_train + sum(steady.lost.values()) == pytest.approx(steady.seconds)


def test_time_between_steps_counts_to_the_later_one_but_not_across_a_restart(tmp_path: Path) -> None:
    clock = [0.0]
    kwargs = {"clock": lambda: clock[0], "wall": lambda: clock[0], "host": "h"}
    log = EventLog(tmp_path / "events", "trainer", **kwargs)  # type: ignore[arg-type]
    log.span_at("step", 0.0, 2.0, step=1, groups=1, samples=1, dropped=0)
    log.span_at("checkpoint", 2.0, 3.0, step=1)
    log.span_at("step", 3.0, 5.0, step=2, groups=1, samples=1, dropped=0)
    clock[0] = 60.0
    log = EventLog(tmp_path / "events", "trainer", **kwargs)  # type: ignore[arg-type]
    log.span_at("step", 61.0, 62.0, step=3, groups=1, samples=1, dropped=0)
    collector = OverlapCollector()
    collector.feed_all(read_events(tmp_path))
    assert collector.run.seconds == pytest.approx(6.0)
    assert collector.run.lost["checkpoint"] == pytest.approx(1.0)
