"""`streamrl trace export`: what it writes is a trace by the published format, and adds up to the metrics."""

from __future__ import annotations

import gzip
import json
import resource
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overlap.scenario import Scenario
from streamrl.cli import main
from streamrl.config import to_yaml
from streamrl.errors import UserError
from streamrl.monitor.event_reader import read_events
from streamrl.monitor.events import EventLog
from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.overlap import OverlapCollector
from streamrl.monitor.schema import CAUSES, TRAIN_SPANS
from streamrl.monitor.trace import flows
from streamrl.monitor.trace.export import export
from streamrl.monitor.trace.flows import TrainedGroups
from streamrl.rollout.sim.virtual_clock import run_virtual
from streamrl.runtime.local_runtime import local_parts
from streamrl.runtime.run_dir import open_run
from streamrl.runtime.session import Session
from streamrl.trainer.batch_log import BatchLog
from tests.dashboard.scripted import GROUPS, Scripted

Trace = list[dict[str, Any]]

REQUIRED = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "M": {"name", "pid", "tid", "args"},
}
"""Keys that the format asks of each phase."""


def traced(run: Path, **options: Any) -> Trace:
    """The export, checked."""
    out = run / "trace.json"
    export(run, out, force=True, **options)
    trace = json.loads(out.read_bytes())["traceEvents"]
    check(trace)
    return trace


def check(trace: Trace) -> None:
    """Raises AssertionError for what is no trace by the format."""
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    named = {(e["pid"], e["tid"]) for e in trace if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in trace if e["ph"] == "M" and e["name"] == "process_name"}
    for event in trace:
        assert event.keys() >= REQUIRED[event["ph"]], event
        assert event["pid"] in processes
        if event["ph"] != "M":
            assert type(event["ts"]) is int
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        elif event["ph"] in "sf":
            arrows[event["id"]].append(event)
    for slices in threads.values():
        check_nesting(slices)
    for ends in arrows.values():
        begin, end = sorted(ends, key=lambda e: e["ph"], reverse=True)
        assert (begin["ph"], end["ph"]) == ("s", "f")
        assert begin["ts"] <= end["ts"]
        for event in ends:
            assert any(a <= event["ts"] <= b for a, b in threads[event["pid"], event["tid"]]), event


def check_nesting(slices: list[tuple[int, int]]) -> None:
    under_way: list[int] = []
    for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
        while under_way and under_way[-1] <= start:
            under_way.pop()
        assert not under_way or end <= under_way[-1], f"{start}-{end} overlaps a slice that ends at {under_way[-1]}"
        under_way.append(end)


def lane(trace: Trace, name: str) -> Trace:
    """The slices of the thread of this name."""
    tids = {e["tid"] for e in trace if e["ph"] == "M" and e["name"] == "thread_name" and e["args"]["name"] == name}
    return [e for e in trace if e["ph"] == "X" and e["tid"] in tids]


def scripted(path: Path, steps: int) -> Scripted:
    """A run of which each step trains what was generated in the step before."""
    run = Scripted(path)
    log = BatchLog(path / "batches.jsonl")
    log.begins(0)
    for step in range(1, steps + 1):
        run.one_step(train=0.3 + 0.1 * (step % 3), wait_data=0.2, idle=0.1)
        log.trained(step, [f"g{step - 1}"], [step])
    log.close()
    return run


def seconds(trace: Trace, step: int) -> dict[str, float]:
    """Of a step, by what they were spent on."""
    steps = lane(trace, "steps")
    whole = next(e for e in steps if e["name"] == f"step {step}")
    found: dict[str, float] = defaultdict(float)
    for part in steps:
        if part is not whole and whole["ts"] <= part["ts"] < whole["ts"] + whole["dur"]:
            found["training" if part["name"] in TRAIN_SPANS else part["name"]] += part["dur"] / 1e6
    return found


def test_slices_of_a_step_add_up_to_its_metrics(tmp_path: Path) -> None:
    scripted(tmp_path, 6)
    trace = traced(tmp_path)
    lines = list(read_metrics(tmp_path))
    assert len(lines) == 6
    for line in lines:
        found = seconds(trace, line["step"])
        assert found["training"] == pytest.approx(line["overlap/train_s"], rel=0.01)
        for cause in CAUSES:
            assert found[cause] == pytest.approx(line[f"lost_s/{cause}"], rel=0.01, abs=1e-5)


def test_a_simulated_run_is_a_valid_trace_with_an_arrow_from_each_session_that_was_trained(tmp_path: Path) -> None:
    config = Scenario(name="small", prompts=4, samples=2, slots=8, train=6.0, sync=0.5, steps=5).config(tmp_path)
    run = open_run(tmp_path, "simulation", to_yaml(config), resume_mode="disable", resume_from=None)

    async def job() -> None:
        async with local_parts(config, run) as parts:
            await Session(parts).run()

    run_virtual(job())
    run.release()
    trace = traced(run.path)
    assert len([e for e in trace if e["ph"] == "f"]) == 5 * 4 * 2
    collector = OverlapCollector()
    collector.feed_all(read_events(run.path))
    account = collector.run
    whole = [e for e in lane(trace, "steps") if e["name"].startswith("step ")]
    parts: Counter[str] = Counter()
    for step in range(1, 6):
        parts.update(seconds(trace, step))
    assert sum(e["dur"] for e in whole) / 1e6 == pytest.approx(account.seconds, rel=0.01)
    assert parts["training"] == pytest.approx(account.train_busy, rel=0.01)
    assert {cause: parts[cause] for cause in CAUSES} == pytest.approx(account.lost, rel=0.01, abs=1e-4)


def test_busy_seconds_of_an_engine_are_those_of_its_events(tmp_path: Path) -> None:
    scripted(tmp_path, 4)
    busy = sum(e.seconds for e in read_events(tmp_path) if e.name == "server_busy")
    assert sum(e["dur"] for e in lane(traced(tmp_path), "server-0")) / 1e6 == pytest.approx(busy, rel=0.01)


def test_a_session_flows_to_the_update_that_trained_its_group(tmp_path: Path) -> None:
    scripted(tmp_path, 5)
    trace = traced(tmp_path)
    ends = [e for e in trace if e["ph"] == "f"]
    assert len(ends) == len([e for e in trace if e["ph"] == "s"]) == 4 * GROUPS  # of step 1 nothing was generated
    updates = [e for e in lane(trace, "steps") if e["name"] == "train"][1:]
    reached = Counter(sum(e["ts"] > update["ts"] + update["dur"] for update in updates) for e in ends)
    assert reached == dict.fromkeys(range(4), GROUPS)


def test_a_group_that_a_resume_trains_again_has_an_arrow_to_each_update(tmp_path: Path) -> None:
    run = scripted(tmp_path, 3)
    log = BatchLog(tmp_path / "batches.jsonl")
    log.begins(2)
    run.trainer = run._log("trainer")
    run.step = 2
    run.one_step()
    log.trained(3, ["g2"], [3])
    log.close()
    ends = [e["ts"] for e in traced(tmp_path) if e["ph"] == "f"]
    assert sorted(Counter(ends).values()) == [GROUPS, GROUPS, GROUPS]


def test_versions_counters_and_names_are_there(tmp_path: Path) -> None:
    scripted(tmp_path, 3)
    trace = traced(tmp_path)
    assert [e["name"] for e in trace if e["ph"] == "i" and "version" in e["name"]] == [
        f"version {step}" for step in (1, 2, 3)
    ]
    counters = {e["name"] for e in trace if e["ph"] == "C"}
    assert {"queue train: ready", "tokens/s server-0"} <= counters
    assert {"steps", "weight sync", "server-0", "server-0 weights", "sessions"} <= {
        e["args"]["name"] for e in trace if e["name"] == "thread_name"
    }


def test_what_a_killed_run_had_under_way_ends_at_its_last_event(tmp_path: Path) -> None:
    run = scripted(tmp_path, 2)
    run.begin("step", step=3)
    run.begin("wait_data", step=3)
    run.tool(None)
    run.at += 7
    run.beat()
    with next((tmp_path / "events").glob("trainer.*")).open("ab") as file:
        file.write(b'{"kind":"span","name":"wait_d')
    trace = traced(tmp_path)
    last = round(run.at * 1e6)
    under_way = {e["name"]: e for e in trace if e["ph"] == "X" and e["ts"] + e["dur"] == last}
    assert under_way.keys() == {"step, not finished", "wait_data", "calculator"}
    assert {e["dur"] for e in under_way.values()} == {7_000_000}


def test_a_step_that_a_kill_cut_short_does_not_reach_into_the_next_life(tmp_path: Path) -> None:
    run = scripted(tmp_path, 2)
    run.begin("step", step=3)
    run.begin("train", step=3)
    run.at += 2
    run.beat()
    run.at += 100
    run.trainer = run._log("trainer")
    run.one_step()
    cut = next(e for e in traced(tmp_path) if e["name"] == "step, not finished")
    assert cut["dur"] == 2_000_000


def test_tool_calls_lie_in_their_session_and_parallel_ones_beside_it(tmp_path: Path) -> None:
    run = Scripted(tmp_path)
    start = run.at
    run.tool(2.0, started=start + 1)
    run.tool(2.0, started=start + 2)
    run.at += 5
    run.session(start, run.at, uid="g1", session=0)
    trace = traced(tmp_path)
    assert [e["name"] for e in lane(trace, "sessions")] == ["session", "calculator"]
    assert [e["ts"] for e in lane(trace, "tool calls")] == [round((start + 2) * 1e6)]


def test_a_range_has_its_steps_alone_and_the_sessions_that_they_trained(tmp_path: Path) -> None:
    scripted(tmp_path, 8)
    trace = traced(tmp_path, from_step=4, to_step=5)
    assert [e["name"] for e in lane(trace, "steps") if e["name"].startswith("step")] == ["step 4", "step 5"]
    assert len([e for e in trace if e["ph"] == "s"]) == 2 * GROUPS
    uids = {e["args"]["uid"] for e in trace if e["ph"] == "X" and e["name"] == "session"}
    assert uids == {"g3", "g4", "g5"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--from-step", "5", "--to-step", "4"], "the first comes first"),
        (["--from-step", "0"], "count from 1"),
        (["--from-step", "9"], "knows steps 1 to 2"),
        (["--out", "{run}/config.yaml"], "--force"),
        (["--out", "{run}"], "is not a file"),
        (["--out", "{run}/nowhere/trace.json"], "No such file"),
    ],
)
def test_a_mistake_is_told_in_a_line(
    tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(tmp_path, 2)
    before = sorted(tmp_path.iterdir())
    assert main(["trace", "export", str(tmp_path), *(option.format(run=tmp_path) for option in options)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no event log"):
        export(tmp_path / "nowhere", tmp_path / "trace.json")


@contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    scripted(tmp_path, 20)
    out = tmp_path / "trace.json"
    out.write_text("old")
    with small_files(1000), pytest.raises(UserError, match="cannot be written: File too large"):
        export(tmp_path, out, force=True)
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_gz_is_compressed(tmp_path: Path) -> None:
    scripted(tmp_path, 2)
    assert main(["trace", "export", str(tmp_path), "--out", str(tmp_path / "t.json.gz")]) == 0
    check(json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"])


def test_groups_of_a_step_are_those_of_the_start_that_trained_it(tmp_path: Path) -> None:
    path = tmp_path / "batches.jsonl"
    for resumed, uids in ((0, "abc"), (1, "de"), (2, "f")):
        log = BatchLog(path)
        log.begins(resumed)
        for step, uid in enumerate(uids, start=resumed + 1):
            log.trained(step, [uid], [step])
        log.close()
    trained = TrainedGroups(path)
    assert [trained.of(step) for step in (1, 2, 3, 4)] == [["a"], ["b"], ["c"], []]
    trained.restarted()
    assert [trained.of(step) for step in (2, 3)] == [["d"], ["e"]]
    trained.restarted()
    assert trained.of(3) == ["f"]
    assert TrainedGroups(path).of(2) == ["d"]  # its first life is known no more


def long_run(path: Path, steps: int) -> None:
    clock = [1000.0]
    batches = BatchLog(path / "batches.jsonl")
    batches.begins(0)
    with EventLog(path / "events", "trainer", clock=lambda: clock[0], wall=lambda: clock[0]) as log:
        for step in range(1, steps + 1):
            began = clock[0]
            with log.span("step", step=step) as span:
                for session in range(10):
                    log.span_at("session", began, began + 0.5, uid=f"g{step}", session=session, status="success")
                clock[0] += 0.6
                with log.span("train", step=step):
                    clock[0] += 0.4
                span.add(groups=1, samples=10, dropped=0)
            batches.trained(step, [f"g{step}"], [step])
    batches.close()


def test_memory_does_not_grow_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "TRAINED", 100)
    peaks = []
    for steps in (500, 2500):  # more than the steps that the overlap account looks back at
        run = tmp_path / str(steps)
        run.mkdir()
        long_run(run, steps)
        tracemalloc.start()
        written = export(run, run / "trace.json")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert written.flows == 10 * steps
    assert peaks[1] < 1.1 * peaks[0] + 100_000
