"""The event log: what is written is read back, whole, in order and on one clock, whatever happened to the writers."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from streamrl.monitor.events import Event, EventLog, EventTail, read_events
from streamrl.monitor.schema import check_events


class Clock:
    """A clock that a test moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_log(run_dir: Path, process: str = "trainer", clock: Clock | None = None, **kwargs: object) -> EventLog:
    clock = clock or Clock()
    return EventLog(run_dir / "events", process, clock=clock, wall=lambda: 1000.0 + clock.now, **kwargs)  # type: ignore[arg-type]


def read(run_dir: Path) -> list[Event]:
    return [event for event in read_events(run_dir) if event.kind != "process"]


def test_a_span_is_read_back_with_its_times_and_fields(tmp_path: Path) -> None:
    clock = Clock()
    log = make_log(tmp_path, clock=clock)
    with log.span("train", step=3) as span:
        clock.now = 2.5
        span.add(rows=128)
    begin, end = read(tmp_path)
    assert (begin.kind, begin.name, begin.start, begin.fields) == ("begin", "train", 1000.0, {"step": 3})
    assert (end.kind, end.start, end.end, end.fields) == ("span", 1000.0, 1002.5, {"step": 3, "rows": 128})
    assert end.process == "trainer"
    assert span.seconds == 2.5


async def test_spans_work_as_async_context_managers_and_note_the_error(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    with pytest.raises(ValueError, match="bad"):
        async with log.span("session", partition="train", uid="a", session=0, status="failed"):
            raise ValueError("bad")
    (event,) = read(tmp_path)
    assert event.fields["error"] == "ValueError"


def test_counters_states_and_metrics_are_read_back(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.counter("queue_groups", np.int64(4), partition="train", state="ready")  # type: ignore[arg-type]
    log.state("run", "training")
    log.step_metrics(7, {"actor/loss": np.float32(0.5), "actor/kl_loss": math.nan})
    log.span_at("tool", 1.0, 2.0, tool="calculator")
    counter, state, metrics, tool = sorted(read(tmp_path), key=lambda e: e.end)
    assert (counter.value, counter.fields) == (4, {"partition": "train", "state": "ready"})
    assert (state.name, state.value) == ("run", "training")
    assert (metrics.value, metrics.fields) == (7, {"actor/loss": 0.5, "actor/kl_loss": None})
    assert tool.seconds == 1.0
    assert check_events(read_events(tmp_path)) == 5


def test_processes_with_different_clocks_are_merged_on_the_wall_clock(tmp_path: Path) -> None:
    one, two = Clock(50.0), Clock(9000.0)
    a = EventLog(tmp_path / "events", "trainer", clock=one, wall=lambda: 1000.0, host="a")
    b = EventLog(tmp_path / "events", "agent-0", clock=two, wall=lambda: 1000.0, host="b")
    for _ in range(3):
        one.now += 1.0
        a.state("run", "training")
        one.now += 1.0
        two.now += 2.0
        b.counter("server_running", 1, server="0")
    events = read(tmp_path)
    assert [event.process for event in events] == ["trainer", "agent-0"] * 3
    assert [event.start for event in events] == [1001.0, 1002.0, 1003.0, 1004.0, 1005.0, 1006.0]


def test_a_jump_of_the_wall_clock_between_two_starts_does_not_reorder_one_host(tmp_path: Path) -> None:
    clock = Clock()
    EventLog(tmp_path / "events", "a", clock=clock, wall=lambda: 1000.0, host="h").state("run", "starting")
    clock.now = 5.0
    EventLog(tmp_path / "events", "b", clock=clock, wall=lambda: 500.0, host="h").state("run", "training")
    assert [(e.process, e.start) for e in read(tmp_path)] == [("a", 1000.0), ("b", 1005.0)]


def test_a_torn_last_line_is_left_out_and_a_restarted_process_opens_a_new_file(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.state("run", "training")
    log.state("run", "validating")
    log.close()
    (file,) = (tmp_path / "events").glob("*.jsonl")
    os.truncate(file, file.stat().st_size - 9)  # killed in the middle of an append
    make_log(tmp_path).state("run", "finished")
    assert [event.value for event in read(tmp_path)] == ["training", "finished"]
    assert sorted(f.name for f in (tmp_path / "events").iterdir()) == ["trainer.0000.jsonl", "trainer.0001.jsonl"]


def test_files_are_rotated_by_size_and_the_oldest_go(tmp_path: Path) -> None:
    log = make_log(tmp_path, max_bytes=2000, keep_files=3)
    for i in range(200):
        log.counter("server_running", i, server="0")
    files = sorted((tmp_path / "events").iterdir())
    assert len(files) == 3
    assert all(file.stat().st_size <= 2000 for file in files)
    values = [event.value for event in read(tmp_path)]
    assert values == list(range(200 - len(values), 200))


def test_a_full_disk_costs_events_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = make_log(tmp_path)
    log.state("run", "starting")
    real_write = os.write

    def half(fd: int, data: bytes) -> int:
        return real_write(fd, data[: len(data) // 2])

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    log.state("run", "torn")
    monkeypatch.setattr(os, "write", full)
    log.state("run", "lost")
    monkeypatch.setattr(os, "write", real_write)
    log.state("run", "finished")
    assert [event.value for event in read(tmp_path)] == ["starting", "finished"]
    assert log.lost == 2


def test_a_field_that_json_cannot_hold_costs_this_event_only(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.state("run", "starting", bad="\ud800")
    log.state("run", "training", path=tmp_path)
    (event,) = read(tmp_path)
    assert event.fields == {"path": str(tmp_path)}


def test_without_a_directory_nothing_is_written_and_spans_still_measure() -> None:
    clock = Clock()
    log = EventLog(None, "agent-0", clock=clock)
    with log.span("train", step=1) as span:
        clock.now = 3.0
    assert span.seconds == 3.0


def test_the_tail_returns_each_event_once_and_only_whole_lines(tmp_path: Path) -> None:
    log = make_log(tmp_path, max_bytes=3000)
    tail = EventTail(tmp_path)
    assert EventTail(tmp_path / "nowhere").poll() == []
    seen: list[Event] = []
    for i in range(100):
        log.counter("server_running", i, server="0")
        if i % 7 == 0:
            seen += tail.poll()
    (last,) = sorted((tmp_path / "events").iterdir())[-1:]
    with last.open("ab") as file:
        file.write(b'{"kind":"counter","name":"server_ru')
        file.flush()
        seen += tail.poll()
        assert tail.poll() == []
        file.write(b'nning","start":5,"value":100,"fields":{"server":"0"}}\n')
    seen += tail.poll()
    assert [event.value for event in seen if event.kind == "counter"] == list(range(101))
    assert tail.damaged == 0


def test_the_tail_catches_up_in_order_and_goes_on_from_there(tmp_path: Path) -> None:
    first, second = Clock(), Clock()
    trainer, worker = make_log(tmp_path, clock=first), make_log(tmp_path, "agent-0", clock=second)
    for step in range(10):
        first.now += 1.0
        trainer.counter("heartbeat", step)
        second.now += 1.5
        worker.counter("heartbeat", step)
    path = next((tmp_path / "events").glob("agent-0.*"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "counter", "na')
    tail = EventTail(tmp_path)
    caught = [event.end for event in tail.catch_up()]
    assert caught == sorted(caught)
    assert len(caught) == 22
    assert tail.poll() == []
    path.write_bytes(whole + b'{"kind": "counter", "name": "heartbeat", "start": 99.0, "value": 7}\n')
    trainer.counter("heartbeat", 10)
    assert sorted(event.value for event in tail.poll()) == [7, 10]


def test_something_that_has_only_begun_is_written_as_that(tmp_path: Path) -> None:
    with make_log(tmp_path, "agent-0") as log:
        log.span_at("tool", 1.0, None, tool="calculator")
        log.span_at("tool", 1.0, 2.0, tool="calculator")
    assert [event.kind for event in read(tmp_path)] == ["begin", "span"]
    assert check_events(read(tmp_path)) == 2


def test_a_process_name_that_is_no_file_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        EventLog(tmp_path, "../trainer")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Event("span", "trian", 0.0, 1.0), "did you mean 'train'"),
        (Event("counter", "train", 0.0, fields={"step": 1}), "is a span"),
        (Event("span", "train", 0.0, 1.0), "lacks the fields"),
    ],
)
def test_an_event_that_the_table_does_not_know_is_an_error(event: Event, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_events([event])
