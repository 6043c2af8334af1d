"""The timeline of a run, fed by its events: lanes of the trainer, the engines and the agent workers."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from streamrl.dashboard.state.lanes import Bars, Sessions, Sitting, concurrency, drawn
from streamrl.dashboard.state.segments import Segment, seconds_by
from streamrl.dashboard.state.trainer_lane import TRAINER, TrainerLane
from streamrl.dashboard.state.verdict import OpenCall
from streamrl.monitor.events import Event
from streamrl.monitor.overlap_account import StepOverlap
from streamrl.monitor.schema import CAUSES

STEPS_KEPT = 20_000
USUAL_CALLS = 64


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A step with its account; `drawn` are the seconds by kind of the segments that are shown for it."""

    step: int
    start: float
    end: float
    account: StepOverlap
    drawn: dict[str, float]

    def row(self) -> dict[str, Any]:
        drawn = {name: round(self.drawn.get(name, 0.0), 6) for name in ("training", *CAUSES)}
        a = self.account
        return {
            "step": self.step, "start": self.start, "end": self.end, "drawn": drawn,
            "efficiency": a.efficiency, "bound": a.bound, "busy": a.generation_busy, "stalled": a.generation_stalled,
            "idle": a.generation_idle,
        }  # fmt: skip


class Timeline:
    """Fed all events in order. Times are wall-clock seconds."""

    def __init__(self) -> None:
        self.lane = TrainerLane()
        self.collector = self.lane.collector
        self.trainer = Bars()
        self.feeder = Bars()
        self.beside = Bars()
        self.engines: dict[str, Bars] = {}
        self.loads: dict[str, Bars] = {}
        self.ranks: dict[str, Bars] = {}
        self.tools: dict[str, Bars] = {}
        self.sessions = Sessions()
        self.versions: list[tuple[float, str, int]] = []
        """(time, engine, version that it took)."""
        self.steps: list[DrawnStep] = []
        self.first = 0.0
        self.last = 0.0
        self._calls: dict[tuple[str, str, float, str, int], OpenCall] = {}
        self._took: dict[str, deque[float]] = {}

    # --- taking events in ---------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        if event.kind in ("span", "begin", "process"):
            self.first = self.first or event.start
            self.last = max(self.last, event.end)
        step = self.lane.feed(event)
        if step is not None:
            self._step(*step)
        elif event.kind == "begin" and event.name == "tool":
            self._begin(event)
        elif event.kind == "span":
            self._span(event)
        elif event.kind == "process" and not event.fields.get("rotated"):
            self.ended(event.process)  # what an earlier life of it had under way

    def _begin(self, event: Event) -> None:
        fields = event.fields
        self._calls[self._key(event)] = OpenCall(
            tool=str(fields.get("tool", "?")), worker=event.process, since=event.start,
            uid=str(fields.get("uid", "")), session=int(fields.get("session", -1)),
        )  # fmt: skip

    @staticmethod
    def _key(event: Event) -> tuple[str, str, float, str, int]:
        fields = event.fields
        at = round(event.start, 6)
        return (
            event.process,
            str(fields.get("tool", "?")),
            at,
            str(fields.get("uid", "")),
            int(fields.get("session", -1)),
        )

    def _span(self, event: Event) -> None:
        bar = Segment(event.start, event.end, event.name)
        if event.name == "session":
            self.sessions.add(event.process, event.start, event.end, event.fields)
        elif event.name == "tool":
            self._calls.pop(self._key(event), None)
            self._took.setdefault(str(event.fields.get("tool", "?")), deque(maxlen=USUAL_CALLS)).append(event.seconds)
            self.tools.setdefault(event.process, Bars()).add(bar)
        elif event.name == "server_busy":
            self.engines.setdefault(str(event.fields.get("server", event.process)), Bars()).add(bar)
        elif event.name == "server_weights":
            server = str(event.fields.get("server", event.process))
            self.loads.setdefault(server, Bars()).add(bar)
            self.versions.append((event.end, server, int(event.fields.get("version", 0))))
        elif event.name == "wait_credit":
            self.feeder.add(bar)
        elif event.name == "validate_beside":
            self.beside.add(bar)
        elif event.name == "rank":
            task = str(event.fields.get("task", "work"))
            self.ranks.setdefault(event.process, Bars()).add(Segment(event.start, event.end, task))

    def _step(self, account: StepOverlap, parts: list[Segment]) -> None:
        record = self.collector.last
        assert record is not None
        for part in parts:
            self.trainer.add(part)
        self.steps.append(DrawnStep(record.step, record.start, record.end, account, seconds_by(parts)))
        if len(self.steps) > STEPS_KEPT:
            del self.steps[: STEPS_KEPT // 4]

    def ended(self, process: str) -> None:
        """This process lives no more."""
        if process == TRAINER:
            self.lane.open.clear()
        self._calls = {key: call for key, call in self._calls.items() if call.worker != process}

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def calls(self) -> list[OpenCall]:
        """Tool calls under way, oldest first, each with what its kind usually takes."""
        usual = {tool: statistics.median(took) for tool, took in self._took.items()}
        found = (
            OpenCall(
                tool=c.tool, worker=c.worker, since=c.since, uid=c.uid, session=c.session, usual=usual.get(c.tool, 0.0)
            )
            for c in self._calls.values()
        )
        return sorted(found, key=lambda call: call.since)

    def open_since(self, name: str) -> float | None:
        """Since when a span of the trainer of this name is under way."""
        return self.lane.open.get(name)

    def partial(self, now: float) -> list[Segment]:
        """The step under way, up to now."""
        return self.lane.partial(now)

    def waits_now(self, now: float) -> str:
        """What the trainer does at this moment, in terms of the account."""
        parts = self.partial(now)
        return parts[-1].what if parts else ""

    def window(self, start: float, end: float, width: int, now: float) -> dict[str, Any]:
        """Everything between two times, no finer than `width` pixels show."""
        if end <= start:
            raise ValueError(f"a stretch of time ends after it begins; not [{start}, {end}]")
        trainer = self.trainer.within(start, end) + [s for s in self.partial(min(now, end)) if s.end > start]
        lanes: list[dict[str, Any]] = [_lane("trainer", "trainer", "Trainer", drawn(trainer, start, end, width))]
        for name, bars in sorted(self.ranks.items()):
            lanes.append(_lane(name, "rank", name, drawn(bars.within(start, end), start, end, width)))
        for name in sorted({*self.engines, *self.loads}):
            lanes.append(self._engine(name, start, end, width))
        waits = self.feeder.within(start, end)
        since = self.open_since("wait_credit")
        if since is not None:
            waits.append(Segment(since, min(now, end), "wait_credit"))
        if waits:
            lanes.append(_lane("feeder", "feeder", "Prompts", drawn(waits, start, end, width)))
        validations = self.beside.within(start, end)
        if validations:
            lanes.append(_lane("validation", "validation", "Validation", drawn(validations, start, end, width)))
        lanes += self._workers(start, end, width, now)
        return {
            "from": start, "to": end, "first": self.first, "last": max(self.last, min(now, end)), "lanes": lanes,
            "steps": [step.row() for step in self.steps if step.end > start and step.start < end][-width:],
            "versions": [v for v in self.versions if start <= v[0] <= end][-width:],
        }  # fmt: skip

    def _engine(self, name: str, start: float, end: float, width: int) -> dict[str, Any]:
        """Busy bars, loads of weights over them, and the gaps with their cause."""
        busy = self.engines.get(name, Bars()).within(start, end)
        loads = [Segment(b.start, b.end, "sync") for b in self.loads.get(name, Bars()).within(start, end)]
        bars = [Segment(b.start, b.end, "busy") for b in busy]
        gaps = self._gaps(busy, start, end) if busy else []
        lane = _lane(name, "engine", name, drawn(sorted(bars + gaps), start, end, width))
        lane["over"] = [list(bar) for bar in drawn(loads, start, end, width)]
        lane["versions"] = [[t, v] for t, server, v in self.versions if server == name and t <= end][-width:]
        return lane

    def _gaps(self, busy: list[Segment], start: float, end: float) -> list[Segment]:
        """Where an engine idled, with the cause: the feeder had no credit, or sessions were busy elsewhere."""
        waits = [(b.start, b.end) for b in self.feeder.within(start, end)]
        since = self.open_since("wait_credit")
        if since is not None:
            waits.append((since, end))
        found: list[Segment] = []
        for left, right in pairwise(busy):
            if right.start - left.end > 1e-3:
                without = sum(max(0.0, min(b, right.start) - max(a, left.end)) for a, b in waits)
                what = "no_credit" if without > (right.start - left.end) / 2 else "no_requests"
                found.append(Segment(left.end, right.start, what))
        return found

    def _workers(self, start: float, end: float, width: int, now: float) -> list[dict[str, Any]]:
        bins = max(1, min(width, 600))
        lanes: list[dict[str, Any]] = []
        within = self.sessions.within(start, end)
        calls = self.calls
        for name in sorted({*within, *(call.worker for call in calls)}):
            tools = drawn(self.tools.get(name, Bars()).within(start, end), start, end, width)
            hanging = [
                Segment(c.since, min(now, end), "open_tool") for c in calls if c.worker == name and c.since < end
            ]
            lane = _lane(
                f"worker:{name}",
                "worker",
                "agents" if name == "trainer" else name,
                [*(bar._replace(what="tool") for bar in tools), *hanging],
            )
            lane["area"] = concurrency(within.get(name, []), start, end, bins)
            lanes.append(lane)
        return lanes

    def sittings(self, worker: str, start: float, end: float, limit: int = 200) -> list[Sitting]:
        """Sessions of a worker in a stretch of time, the longest first."""
        found = self.sessions.within(start, end).get(worker, [])
        return sorted(found, key=lambda s: s.start - s.end)[:limit]


def _lane(identity: str, kind: str, label: str, bars: list[Segment]) -> dict[str, Any]:
    return {"id": identity, "kind": kind, "label": label, "bars": [list(bar) for bar in bars]}
