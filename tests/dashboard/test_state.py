"""The state of a run, from its events alone; a snapshot and what followed say the same as a later snapshot."""

from __future__ import annotations

import json
from pathlib import Path

from streamrl.dashboard.reading import MetricsTail
from streamrl.dashboard.state.run_state import RunState
from streamrl.monitor.events import EventTail, read_events
from streamrl.monitor.metrics_log import MetricsLog, read_metrics
from tests.dashboard.scripted import Scripted
from transfer_queue.net.messages import HolderStats, PartitionStats, QueueStats, UnitStats


def state_of(path: Path) -> RunState:
    state = RunState({"trainer": {"v1": {"trainer_mode": "separate_async"}}}, path.name)
    for event in read_events(path):
        state.feed(event)
    for line in read_metrics(path):
        state.metrics_line(line)
    return state


def stats(**changes) -> QueueStats:
    part = {
        "depth": {"pending": 1, "generating": 2, "ready": 3, "training": 0, "trained": 9}, "rows": 40, "nbytes": 4000,
        "next_order": 15, "dropped": {"stale": 1, "failed: ValueError": 2}, "redelivered": 1, "dead": {"g7": "poison"},
        "oldest_age": {"pending": 2.0}, "max_groups": 6, "leases": [HolderStats("generate", "agent-0", 2, 4.0)],
        "fields": {"input_ids": 40, "old_log_probs": 10}, **changes,
    }  # fmt: skip
    return QueueStats(
        epoch=2, partitions={"train": PartitionStats(**part)}, units=[UnitStats(0, True, 10, 100, 1)], clients=4
    )


def test_the_overview_says_where_the_run_is(tmp_path: Path) -> None:
    run = Scripted(tmp_path)
    run.steps(12, train=0.1, wait_data=0.9)
    state = state_of(tmp_path)
    state.last_sign = run.at
    found = state.overview(run.at)
    assert (found["step"], found["total"], found["trainer_version"], found["served"]) == (12, 100, 12, [12, 12])
    assert found["reward"] == 0.12
    assert found["ready"] == 2
    assert found["verdict"]["cause"] == "wait_data"
    assert sum(found["verdict"]["shares"].values()) > 0.99


def test_the_chart_of_depth_has_a_point_for_each_look(tmp_path: Path) -> None:
    run = Scripted(tmp_path)
    run.steps(3)
    state = state_of(tmp_path)
    state.queue.settle()
    assert [row[1:4] for row in state.queue.series.rows] == [(1, 3, 2)] * 4
    assert [row[5] for row in state.queue.series.rows] == [0, 4, 8, 12]


def test_what_the_queue_itself_says_is_shown_while_it_lives(tmp_path: Path) -> None:
    run = Scripted(tmp_path)
    run.steps(1)
    state = state_of(tmp_path)
    state.queue.ask(stats(), run.at + 1)
    page = state.queue.page()
    (part,) = page["partitions"]
    assert page["live"]
    assert part["leases"] == [{"task": "generate", "holder": "agent-0", "groups": 2, "oldest": run.at + 1 - 4.0}]
    assert part["fields"] == {"input_ids": 40, "old_log_probs": 10}
    assert part["dropped"] == {"stale": 1, "failed": 2}
    assert part["dead"] == [{"uid": "g7", "reason": "poison"}]
    assert (part["out"], part["credit"]) == (6, 6)
    state.queue.gone()
    assert not state.queue.page()["live"]
    assert state.queue.page()["partitions"][0]["dead"] == [{"uid": "g7", "reason": "poison"}]


def test_nothing_is_sent_twice_and_what_did_not_change_not_at_all(tmp_path: Path) -> None:
    run = Scripted(tmp_path)
    run.steps(3)
    state = state_of(tmp_path)
    state.last_sign = run.at
    first = json.loads(state.delta(run.at))
    assert set(first) >= {"overview", "queue", "pipeline", "fleet", "charts", "steps"}
    assert state.delta(run.at) == b""


def test_a_snapshot_and_the_deltas_after_it_tell_what_a_later_snapshot_tells(tmp_path: Path) -> None:
    run, tail, lines = Scripted(tmp_path), EventTail(tmp_path), MetricsTail(tmp_path)
    state = RunState({}, "run")

    def look() -> bytes | None:
        for event in tail.poll():
            state.feed(event)
        for line in lines.poll()[1]:
            state.metrics_line(line)
        return state.delta(run.at)

    run.steps(3)
    look()
    known = json.loads(state.snapshot(run.at))
    for _ in range(20):
        run.steps(1, train=0.3)
        delta = json.loads(look() or b"{}")
        for name, rows in delta.pop("charts", {}).items():
            known["charts"][name] += rows
        for name, column in delta.pop("steps", {}).items():
            known["steps"].setdefault(name, []).extend(column)
        known |= delta
    later = json.loads(state.snapshot(run.at))
    assert known["charts"] == later["charts"]
    assert known["steps"]["step"] == later["steps"]["step"] == list(range(1, 24))
    assert known["steps"]["critic/score/mean"] == later["steps"]["critic/score/mean"]
    assert known["overview"] == later["overview"]
    assert known["queue"] == later["queue"]


def test_a_resume_makes_everybody_take_a_snapshot(tmp_path: Path) -> None:
    run, lines = Scripted(tmp_path), MetricsTail(tmp_path)
    run.steps(6)
    state = RunState({}, "run")
    for line in lines.poll()[1]:
        state.metrics_line(line)
    state.delta(run.at)
    run.metrics.close()
    MetricsLog(tmp_path, resume_step=4).write(5, {"critic/score/mean": 0.5})
    anew, again = lines.poll()
    assert anew
    state.metrics_anew()
    for line in again:
        state.metrics_line(line)
    assert state.delta(run.at) is None
    assert state.steps.shown([], 100)["step"] == [1, 2, 3, 4, 5]


def test_a_torn_or_damaged_line_of_metrics_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\nnot JSON\n{"loss": 3}\n{"step": 2, "loss": 1}\n{"step"')
    tail = MetricsTail(tmp_path)
    assert tail.poll() == (False, [{"step": 1}, {"step": 2, "loss": 1}])
    assert tail.damaged == 2


def test_what_hangs_died_or_was_given_up_is_an_alert(tmp_path: Path) -> None:
    run = Scripted(tmp_path)
    run.steps(2)
    run.tool(None, started=run.at - 60)
    run.trainer.state("dropped", "dead", uid="g9", reason="killed three workers")
    state = state_of(tmp_path)
    state.last_sign = run.at
    state.host = state.fleet.processes["trainer"].host
    state.processes(lambda pid: True)
    names = {alert["name"] for alert in state.overview(run.at)["alerts"]}
    assert names == {"tool", "dead"}
    state.processes(lambda pid: False)
    assert "silence" in {alert["name"] for alert in state.overview(run.at)["alerts"]}


def test_any_text_of_a_run_may_be_anything(tmp_path: Path) -> None:
    run = Scripted(tmp_path)
    run.trainer.state("note", "<script>alert(1)</script>\x1b[31m\x00\u202e" + "x" * 1_000_000)
    run.trainer.state("dropped", "dead", uid="<img src=x onerror=alert(1)>", reason="\ud83d" * 3)
    run.tool(None)
    assert len(state_of(tmp_path).snapshot(run.at)) < 100_000
