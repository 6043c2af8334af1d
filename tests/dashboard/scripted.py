"""Runs that happened as a test says: their directory, written by the real event log and metrics log.

run = Scripted(tmp_path, now=1000.0)
run.steps(10, train=0.2, wait_data=0.8)
run.at                       # the time that it has come to
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from streamrl.dashboard.reading import boot
from streamrl.monitor.event_reader import EventTail
from streamrl.monitor.events import EventLog
from streamrl.monitor.metrics_log import MetricsLog
from streamrl.monitor.overlap import OverlapCollector

CONFIG = """\
trainer: {v1: {trainer_mode: separate_async}, project_name: test}
"""

GROUPS, SAMPLES = 4, 16


class Scripted:
    """A trainer with one engine and one agent worker. `at` is both its clock and the wall clock."""

    def __init__(self, path: Path, *, at: float = 1_000_000.0, host: str | None = None) -> None:
        self.path = path
        self.at = at
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(CONFIG)
        self._host = host or boot()
        self.trainer = self._log("trainer")
        self.worker = self._log("agent-0")
        self.engine = self._log("server-0")
        self.metrics = MetricsLog(path)
        self._collector, self._tail = OverlapCollector(), EventTail(path)
        self.step = 0
        self._busy = 0.0
        self._tokens = 0
        self.trainer.state("run", "training")
        self.trainer.state("total_steps", 100)
        self.counters(idle=0.0)

    def _log(self, process: str) -> EventLog:
        return EventLog(self.path / "events", process, clock=lambda: self.at, wall=lambda: self.at, host=self._host)

    def span(self, name: str, seconds: float, **fields: Any) -> None:
        with self.trainer.span(name, **fields):
            self.at += seconds

    def steps(self, count: int, **seconds: float) -> None:
        for _ in range(count):
            self.one_step(**seconds)

    def one_step(
        self, *, train: float = 0.5, wait_data: float = 0.1, sync: float = 0.05, idle: float = 0.0, **metrics: float
    ) -> None:
        """`idle`: share of the step in which the engine has nothing to do."""
        began, step = self.at, self.step + 1
        with self.trainer.span("step", step=step) as span:
            self.span("wait_data", wait_data, step=step)
            self.span("train", train, step=step, rows=SAMPLES, tokens=100)
            self.span("publish", sync, version=step)
            self.engine.span_at("server_weights", self.at - sync / 2, self.at, server="server-0", version=step)
            whole = self.at - began
            self.engine.span_at("server_busy", began, began + whole * (1 - idle), server="server-0", tokens=1000)
            for session in range(GROUPS):
                self.session(began, began + whole * (1 - idle), uid=f"g{step}", session=session)
            self.step = step
            self.counters(idle=idle, whole=whole)
            span.add(groups=GROUPS, samples=SAMPLES, dropped=0)
        account = self._collector.feed_all(self._tail.poll())
        line = {
            "training/global_step": float(step), "critic/score/mean": step / 100, "reward/ema": step / 110,
            "perf/throughput": 1000.0, "perf/time_per_step": whole, **account, **metrics,
        }  # fmt: skip
        self.metrics.write(step, line)
        self.trainer.step_metrics(step, line)

    def session(self, start: float, end: float, *, uid: str, session: int, tool_seconds: float = 0.0) -> None:
        self.worker.span_at(
            "session", start, end, partition="train", uid=uid, session=session, status="success", tokens=64, turns=2,
            engine_seconds=0.8 * (end - start), queue_seconds=0.0, tool_seconds=tool_seconds, score=1.0,
        )  # fmt: skip

    def tool(self, seconds: float | None, *, started: float | None = None) -> None:
        """A call of the calculator that took so long, or (None) has not come back."""
        start = self.at if started is None else started
        self.worker.span_at("tool", start, None, tool="calculator", uid="g1", session=0)
        if seconds is not None:
            self.worker.span_at("tool", start, start + seconds, tool="calculator", uid="g1", session=0)

    def counters(self, *, idle: float, whole: float = 0.0) -> None:
        self._busy += whole * (1 - idle)
        self._tokens += 1000
        log = self.trainer
        self.depth(pending=1, generating=3, ready=2, training=0, trained=GROUPS * self.step)
        log.counter("queue_credit", 8, partition="train")
        log.counter("queue_rows", 99, partition="train")
        log.counter("server_slots", 64, server="server-0")
        log.counter("server_running", 32, server="server-0")
        log.counter("server_tokens", self._tokens, server="server-0")
        log.counter("server_busy_seconds", self._busy, server="server-0")
        log.counter("weight_version", self.step, role="trainer", engine="")
        log.counter("weight_version", self.step, role="rollout", engine="server-0")

    def depth(self, **states: int) -> None:
        for state, groups in states.items():
            self.trainer.counter("queue_groups", groups, partition="train", state=state)

    def beat(self) -> None:
        self.trainer.counter("heartbeat", 1)

    @contextmanager
    def living(self, every: float = 1.0) -> Iterator[Self]:
        """It beats, as a trainer's process does, until the block is left."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(every):
                self.beat()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join()

    def begin(self, name: str, **fields: Any) -> None:
        """A span of the trainer that stays open."""
        self.trainer.span(name, **fields).__enter__()

    def close(self) -> None:
        for log in (self.trainer, self.worker, self.engine):
            log.close()
        self.metrics.close()
