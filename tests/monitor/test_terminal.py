"""The terminal view: drawn from a synthetic event log, recorded; plain where stdout is no terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agent_loop.llm.protocol import ServerLoad
from streamrl.monitor.emit import emit_loads, emit_queue, emit_trainer_version
from streamrl.monitor.events import Event, EventLog, read_events
from streamrl.monitor.run_view import RunView, render, sparkline
from streamrl.monitor.schema import check_events
from streamrl.monitor.terminal import TerminalView
from transfer_queue.net.messages import PartitionStats, QueueStats


def queue_stats(step: int) -> QueueStats:
    part = PartitionStats(
        depth={"pending": 8, "generating": 16, "ready": step, "training": 4, "trained": 16 * step},
        rows=100,
        nbytes=1 << 20,
        next_order=50,
        dropped={},
        redelivered=0,
        dead={},
        oldest_age={},
    )
    return QueueStats(epoch=1, partitions={"train": part, "val": part}, units=[], clients=3)


class Run:
    """A run of one second a step, written to a log; its clock stands where the log stands."""

    def __init__(self, run_dir: Path) -> None:
        self.now = 100.0
        self.log = EventLog(run_dir / "events", "trainer", clock=lambda: self.now, wall=lambda: self.now)
        self.log.state("run", "starting")
        self.log.state("total_steps", 60)
        self.log.state("validation", "before", step=0, **{"val-core/calculator/reward/mean@1": 0.31})
        self.log.state("run", "training")

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.now += 1.0
            emit_queue(self.log, queue_stats(step))
            load = ServerLoad(
                running=3,
                waiting=1,
                slots=4,
                weight_version=step - 1,
                tokens_generated=500 * step,
                busy_seconds=0.9 * step,
            )
            emit_loads(self.log, {"s0": load})
            emit_trainer_version(self.log, step)
            self.log.step_metrics(step, {
                "critic/score/mean": 0.3 + step / 100, "timing_s/step": 1.0,
                "training/off_policy/trajectory_staleness/mean": 0.8,
                "training/off_policy/trajectory_staleness_worst/max": 2,
                "overlap/step_s": 1.0, "overlap/train_s": 0.4, "lost_s/wait_data": 0.5, "lost_s/sync": 0.1,
            })  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def drawn(view: RunView, now: float) -> str:
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(render(view, now))
    return console.export_text()


def view_of(run_dir: Path) -> RunView:
    view = RunView()
    for event in read_events(run_dir):
        view.feed(event)
    return view


def test_the_panel_shows_what_a_person_wants_to_know(run: Run, tmp_path: Path) -> None:
    run.steps(1, 12)
    text = drawn(view_of(tmp_path), run.now)
    assert "StreamRL: training" in text
    assert "step 12/60" in text
    assert "(last 0.420)" in text
    assert "▁▁▂▃▃▄▄▅▆▆▇█"[:3] in text
    assert "pending 8 generating 16 ready 12 training 4" in text
    assert "mean 0.8 max 2" in text
    assert "trainer 12 servers 11" in text
    assert "0:00:48 left" in text
    assert "waiting for data takes 50 % of the last 10 steps" in text
    assert "calculator/reward/mean@1 0.310" in text
    assert check_events(read_events(tmp_path)) > 0


def test_tokens_per_second_are_those_of_the_last_seconds(run: Run, tmp_path: Path) -> None:
    run.steps(1, 30)
    assert view_of(tmp_path).tokens_per_second == pytest.approx(500)


@pytest.mark.parametrize("step_seconds", [1.0, 30.0])
def test_tokens_per_second_of_several_servers_add_up_however_long_a_step_takes(step_seconds: float) -> None:
    view = RunView()
    for step in range(1, 20):
        for place, (server, rate) in enumerate({"a": 100, "b": 40, "gone": 7}.items()):
            if server == "gone" and step > 4:
                continue
            at = step * step_seconds + 1e-5 * place  # one look at all of them
            count = round(rate * (step - (10 if server == "b" and step > 10 else 0)) * step_seconds)  # b: a restart
            view.feed(Event("counter", "server_tokens", at, at, value=count, fields={"server": server}))
    assert view.tokens_per_second == pytest.approx(140, rel=1e-3)


def test_a_stall_shows_what_is_under_way_and_that_the_run_is_silent(run: Run, tmp_path: Path) -> None:
    run.steps(1, 2)
    run.log.span("step", step=3).__enter__()
    run.log.span("wait_data", step=3).__enter__()
    text = drawn(view_of(tmp_path), run.now + 37.0)
    assert "waiting for data for 37.0 s" in text
    assert "no event for 37 s" in text


def test_an_empty_run_can_be_drawn(tmp_path: Path) -> None:
    assert "StreamRL: starting" in drawn(view_of(tmp_path), 0.0)


def test_where_stdout_is_no_terminal_there_is_one_line_per_step(run: Run, tmp_path: Path) -> None:
    out = io.StringIO()
    with TerminalView(tmp_path, Console(file=out, width=60)):
        run.steps(1, 3)
        run.log.state("restart", "agent-1 after signal 9", role="agent worker")
        run.log.state("service", "server-0 is out of service: it is gone", server="server-0")
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["run: starting", "validation before, step 0: calculator/reward/mean@1 0.310", "run: training"]
    assert [line.split(" | ")[0] for line in lines[3:6]] == ["step 1/60", "step 2/60", "step 3/60"]
    assert "reward 0.313 (last 0.330)" in lines[5]
    assert "limit waiting for data takes 50 % of the last 3 steps" in lines[5]
    assert lines[6:] == ["restarted agent worker: agent-1 after signal 9", "server-0 is out of service: it is gone"]


def test_groups_that_left_untrained_are_counted_by_kind_with_the_last_ones_reason(run: Run, tmp_path: Path) -> None:
    run.steps(1, 1)
    assert "dropped" not in view_of(tmp_path).line()
    for state, reason in [
        ("dropped", "stale"), ("dropped", "stale"), ("dropped", "failed: KeyError: 'answer'"),
        ("dropped", "failed: LookupError: the agent\x1b[31m lost: " + 500 * "x"), ("dead", "its holder 'a' died"),
    ]:  # fmt: skip
        run.log.state("dropped", state, uid="u", reason=reason)
    run.steps(2, 2)
    view = view_of(tmp_path)
    assert "| dropped 2 stale, 2 failed (LookupError: the agent [31m lost: xxx" in view.line()
    assert view.line().endswith("xxx), 1 dead (its holder 'a' died)")
    assert len(view.line()) < 500
    assert "2 stale, 2 failed (LookupError" in drawn(view, run.now)
    assert check_events(read_events(tmp_path)) > 0


def test_a_finished_run_is_shown_once(run: Run, tmp_path: Path) -> None:
    run.steps(1, 60)
    run.log.state("run", "finished")
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    TerminalView(tmp_path, console, wall=lambda: run.now + 1e6).follow()
    text = console.export_text()
    assert "StreamRL: finished" in text
    assert "step 60/60" in text
    assert "is the run alive" not in text


def test_following_a_dead_run_ends_where_nobody_watches(run: Run, tmp_path: Path) -> None:
    run.steps(1, 2)
    out = io.StringIO()
    TerminalView(tmp_path, Console(file=out), wall=lambda: run.now + 1e6).follow()
    assert "step 2/60" in out.getvalue()


def test_text_from_the_log_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    run.log.state("run", "\x1b[2J[red]boo\r\n")
    view = view_of(tmp_path)
    assert view.status == " [2J[red]boo  "
    assert "\x1b" not in drawn(view, run.now)
    assert "[red]boo" in drawn(view, run.now)


@pytest.mark.parametrize(
    ("values", "expected"), [([], ""), ([0.5], "▁"), ([0.0, 0.5, 1.0], "▁▄█"), ([float(i) for i in range(50)], None)]
)
def test_sparkline(values: list[float], expected: str | None) -> None:
    drawn_line = sparkline(values)
    assert drawn_line == expected or (expected is None and len(drawn_line) == 40)


def test_notes_and_samples_stay_on_a_terminal_above_the_panel(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events", "trainer") as log:
        log.state("note", "look\x1b here")
        log.state("sample", "greedy", step=3, input="1 + 1 = ?", output="two", score=0.5)
        log.state("part", "the queue stands")
        log.state("run", "finished")
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    TerminalView(tmp_path, console, live=True).follow()
    text = console.file.getvalue()
    assert "note: look  here" in text
    assert "validation sample, step 3, greedy: score 0.5\n  asked    1 + 1 = ?\n  answered two" in text
    assert "starting: the queue" not in text, "that is for where there is no panel"
