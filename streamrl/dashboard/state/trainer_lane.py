"""The trainer's lane, step by step: its events in, segments with the account of the same step out."""

from __future__ import annotations

from streamrl.dashboard.state.segments import Segment, segments, what_of
from streamrl.monitor.events import Event
from streamrl.monitor.overlap import OverlapCollector
from streamrl.monitor.overlap_account import StepOverlap

TRAINER = "trainer"


class TrainerLane:
    """Fed all events in order, or the trainer's alone. Invariant: the segments of a step fill the step that its account
    is of (`collector.last`), without gap or overlap."""

    def __init__(self) -> None:
        self.collector = OverlapCollector()
        self.open: dict[str, float] = {}
        """Spans of the trainer under way, but tool calls: since when."""
        self._began: float | None = None  # where the step under way began: the end of the last
        self._spans: list[Segment] = []

    def feed(self, event: Event) -> tuple[StepOverlap, list[Segment]] | None:
        """Account and segments of a step, when its span arrives."""
        account = self.collector.feed(event)
        if event.process != TRAINER:
            return None
        if event.kind == "span":
            self.open.pop(event.name, None)
        if account is not None:
            record = self.collector.last
            assert record is not None
            parts = segments(record.start, record.end, self._spans)
            self._spans, self._began = [], record.end
            return account, parts
        what = what_of(event.name)
        if event.kind == "begin" and event.name != "tool":
            if event.name == "step" and self._began is None:
                self._began = event.start
            self.open[event.name] = event.start
        elif event.kind == "span" and what is not None:
            self._spans.append(Segment(event.start, event.end, what))
        elif event.kind == "span" and event.name == "step":  # one that an exception ended
            self._spans, self._began = [], None
        elif event.kind == "process" and not event.fields.get("rotated"):  # it was started anew
            self.open, self._spans, self._began = {}, [], None
        return None

    def partial(self, now: float) -> list[Segment]:
        """The step under way, up to now: what ended of it and what has begun."""
        if self._began is None or "step" not in self.open:
            return []
        running = [
            Segment(start, now, what) for name, start in self.open.items() if (what := what_of(name)) is not None
        ]
        return segments(self._began, max(now, self._began), [*self._spans, *running])
