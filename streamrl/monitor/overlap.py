"""The overlap account of a run, made from its events, live or post mortem.

    collector = OverlapCollector()
    for event in read_events(run_dir): collector.feed(event)
    collector.run.efficiency, collector.run.lost

What η, the bound and the losses are: overlap_account.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.monitor.events import Event
from streamrl.monitor.overlap_account import Interval, Overlap, RunOverlap, StepOverlap, StepRecord
from streamrl.monitor.schema import CAUSE_OF_SPAN, TRAIN_SPANS, Cause

__all__ = ["Interval", "Overlap", "OverlapCollector", "RunOverlap", "StepOverlap", "StepRecord"]


class OverlapCollector:
    """Makes step records out of events (of all processes, as read) and keeps their account.

    A step's record begins where the step before it ended, so what a trainer does between two `step` spans counts to the
    later one; the first step after a start of the trainer begins at its own span. A step that an exception ended does
    not count.
    """

    def __init__(self) -> None:
        self.overlap = Overlap()
        self.last: StepRecord | None = None
        """The record behind the last account."""
        self._last_end: float | None = None
        self._servers: dict[str, dict[str, float]] = {}
        self._cpu: float | None = None  # as last read; the first reading is only where counting begins
        self._cores = 0
        self._begin()

    def _begin(self) -> None:
        self._train: list[Interval] = []
        self._waits: dict[Cause, list[Interval]] = {}
        self._publishes: list[Event] = []
        self._busy = self._slot_seconds = self._cpu_seconds = 0.0
        self._sessions = 0
        self._heard: set[str] = set()

    @property
    def run(self) -> RunOverlap:
        return self.overlap.run

    def feed_all(self, events: Iterable[Event]) -> dict[str, float]:
        """The metrics of the last step that these events completed; empty if none did."""
        metrics: dict[str, float] = {}
        for event in events:
            account = self.feed(event)
            if account is not None:
                metrics = account.metrics()
        return metrics

    def feed(self, event: Event) -> StepOverlap | None:
        """The account of a step, when its span arrives."""
        if event.kind == "span":
            if event.name == "step":
                return self._finish(event)
            self._span(event)
        elif event.kind == "counter" and event.name.startswith("server_"):
            self._server(event)
        elif event.name == "cpu_seconds" and isinstance(event.value, (int, float)):
            self._cpu_seconds += max(0.0, event.value - self._cpu) if self._cpu is not None else 0.0
            self._cpu, self._cores = event.value, int(event.fields.get("cores", 0))
        elif event.kind == "process" and event.name == "trainer" and not event.fields.get("rotated"):
            self._last_end = self._cpu = None
            self._begin()
        return None

    def _span(self, event: Event) -> None:
        interval = (event.start, event.end)
        if event.name in TRAIN_SPANS:
            self._train.append(interval)
        elif event.name in CAUSE_OF_SPAN:
            self._waits.setdefault(CAUSE_OF_SPAN[event.name], []).append(interval)
            if event.name == "publish":
                self._publishes.append(event)
        elif event.name == "session" and "engine_seconds" in event.fields and event.fields.get("partition") != "val":
            self._sessions += 1
            self._slot_seconds += event.fields["engine_seconds"]

    def _server(self, event: Event) -> None:
        if not isinstance(event.value, (int, float)):
            return
        server = str(event.fields.get("server", ""))
        known = self._servers.setdefault(server, {})
        if event.name == "server_busy_seconds":
            before = known.get(event.name, event.value)  # the first reading is only where counting begins
            self._busy += event.value - before if event.value >= before else event.value  # less: it was restarted
        known[event.name] = event.value
        self._heard.add(server)

    def _finish(self, event: Event) -> StepOverlap | None:
        if "error" in event.fields:  # no step: it was cut short
            self._last_end = None
            self._begin()
            return None
        engines = self._heard or set(self._servers)
        fields, start = event.fields, event.start
        if self._last_end is not None and self._last_end < start:  # else of an earlier life, whose clock ran ahead
            start = self._last_end
        publishes = [publish for publish in self._publishes if publish.end > start]
        record = StepRecord(
            step=int(fields.get("step", 0)),
            start=start,
            end=event.end,
            train=self._train,
            waits=self._waits,
            sync_seconds=sum(publish.seconds for publish in publishes),
            generation_stalled=sum(publish.fields.get("generation_stalled", 0.0) for publish in publishes),
            generation_busy=self._busy,
            engines=len(engines),
            slots=int(sum(self._servers[server].get("server_slots", 0) for server in engines)),
            slot_seconds=self._slot_seconds,
            sessions=self._sessions,
            samples=int(fields.get("samples", 0)),
            groups=int(fields.get("groups", 0)),
            groups_dropped=int(fields.get("dropped", 0)),
            cpu_seconds=self._cpu_seconds,
            cores=self._cores,
        )
        self._last_end = event.end
        self._begin()
        self.last = record
        return self.overlap.add(record)
