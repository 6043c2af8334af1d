"""What becomes of each event in the trace: slices, counters, instants, flows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from streamrl.dashboard.state.segments import Segment
from streamrl.dashboard.state.trainer_lane import TRAINER, TrainerLane
from streamrl.monitor.events import Event
from streamrl.monitor.schema import TRAIN_SPANS
from streamrl.monitor.trace.flows import Awaiting, Generated, TrainedGroups
from streamrl.monitor.trace.tracks import Place, Tracks, arguments, micros, sliced

OWN_LANES = {
    "publish": "weight sync",
    "checkpoint": "checkpoints",
    "validate": "validation",
    "validate_beside": "validation",
    "wait_credit": "prompts",
}
"""Spans of the trainer that also have a lane of their own, where they are whole, whatever took precedence."""

TOOL_CALLS = 50_000
"""Calls that wait for the end of their session; beyond, the oldest go to a lane of their own."""

STALENESS = "training/off_policy/trajectory_staleness/"

LATEST = 1e11
"""Seconds, the year 5138: no time of an event is later."""

Stretch = tuple[float, float]
"""From and to, in seconds."""

ALWAYS: Stretch = (0.0, math.inf)


class Slices:
    """Fed all events in order, then `finish`. Writes what touches the `stretch`, and the sessions that it trained.

    `last` is the time of the last event. Sums of the slices in `steps` are those of the dashboard and the metrics.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None], trained: TrainedGroups, stretch: Stretch = ALWAYS):
        self.steps = self.flows = self.left_out = 0
        self.last = 0.0
        self._tracks = Tracks(write)
        self._write, self._trained, self._stretch = write, trained, stretch
        self._lane = TrainerLane()
        self._awaiting = Awaiting()
        self._open: dict[tuple[Any, ...], Event] = {}
        self._seen: dict[str, float] = {}  # process: its last event
        self._calls: dict[tuple[Any, ...], list[Event]] = {}  # by session
        self._held = 0
        self._tokens: dict[str, tuple[float, float]] = {}  # server: (time, tokens)

    def feed(self, event: Event) -> None:
        if not 0 <= event.start <= event.end < LATEST:
            self.left_out += 1
            return
        if event.kind == "process" and not event.fields.get("rotated"):
            self._ended(event.process, self._seen.get(event.process, event.start))
            if event.process == TRAINER:
                self._trained.restarted()
        self.last = max(self.last, event.end)
        self._seen[event.process] = max(self._seen.get(event.process, 0.0), event.end)
        if event.name == "step" and event.kind == "span" and "error" in event.fields:
            self._cut_short(event.end, event.fields)
        if event.kind == "span":
            self._open.pop(self._key(event), None)
        step = self._lane.feed(event)
        if step is not None:
            account, parts = step
            more = {"efficiency": account.efficiency, "bound_s": account.bound}
            self._step(parts, arguments(event.fields) | more)
        elif event.kind == "begin":
            self._open[self._key(event)] = event
        elif event.kind == "span":
            self._span(event)
        elif event.kind in ("counter", "metrics"):
            self._count(event)
        elif event.kind == "state":
            self._state(event)

    def finish(self) -> None:
        """What is still under way ends at the last event."""
        for process in list(self._seen):
            self._ended(process, self.last)
        for key in list(self._calls):
            self._alone(key)

    # --- the trainer --------------------------------------------------------------------------------------------

    def _step(self, parts: list[Segment], args: dict[str, Any], *, whole: bool = True) -> None:
        """A step with what it was spent on, and flows from the sessions that it trained."""
        start, end = parts[0].start, parts[-1].end
        uids = self._trained.of(int(args.get("step", 0))) if whole else []
        sessions = [session for uid in uids for session in self._awaiting.trained(uid)]
        if not self._wanted(start, end):
            return
        self.steps += whole
        place = self._tracks.place("Trainer", "steps", start, end)
        self._tracks.slice(place, f"step {args['step']}" if whole else "step, not finished", args)
        training: list[Place] = []
        for part in parts:
            inside = place._replace(start=micros(part.start), end=micros(part.end))
            if inside.end > inside.start:
                self._tracks.slice(inside, part.what, {})
                if part.what in TRAIN_SPANS:
                    training.append(inside)
        for session in sessions:
            self._flow(session, training)

    def _flow(self, session: Generated, training: list[Place]) -> None:
        """To the first slice of training that a session's rows can have been in."""
        target = next((place for place in training if place.end > session.place.end), None)
        if target is not None:
            for slice_ in session.unwritten:
                self._write(slice_)
            session.unwritten.clear()
            self.flows += 1
            self._tracks.flow(self.flows, "trained", session.place, target)

    def _cut_short(self, now: float, fields: dict[str, Any]) -> None:
        parts = self._lane.partial(now)
        if parts:
            self._step(parts, arguments(fields), whole=False)

    def _ended(self, process: str, now: float) -> None:
        """This process, or a life of it, is over."""
        if process == TRAINER:
            self._cut_short(now, {})
        for key in [key for key in self._open if key[0] == process]:
            event = self._open.pop(key)
            event.end, event.fields = max(now, event.start), event.fields | {"unfinished": True}
            self._span(event)

    # --- the others ---------------------------------------------------------------------------------------------

    @staticmethod
    def _key(event: Event) -> tuple[Any, ...]:
        fields = event.fields
        which = (str(fields.get("tool", fields.get("task", ""))), str(fields.get("uid", "")), fields.get("session"))
        return (event.process, event.name, round(event.start, 6), *which)

    def _span(self, event: Event) -> None:
        fields = event.fields
        server = str(fields.get("server", event.process))
        if event.name == "session":
            self._session(event)
        elif event.name == "tool":
            self._tool(event)
        elif event.name == "rank":
            self._slice("Training ranks", event.process, event, str(fields.get("task", "work")))
        elif event.name == "server_busy":
            self._slice("Engines", server, event, "busy")
        elif event.name == "server_weights":
            self._slice("Engines", f"{server} weights", event, f"weights {fields.get('version', '')}")
        elif event.name in OWN_LANES and event.process == TRAINER:
            place = self._slice("Trainer", OWN_LANES[event.name], event, event.name)
            if place is not None and event.name == "publish" and not fields.keys() & {"error", "unfinished"}:
                self._tracks.instant(place, f"version {fields.get('version', '')}", {})

    def _slice(self, process: str, lane: str, event: Event, name: str) -> Place | None:
        if not self._wanted(event.start, event.end):
            return None
        place = self._tracks.place(process, lane, event.start, event.end)
        self._tracks.slice(place, name, arguments(event.fields))
        return place

    def _session(self, event: Event) -> None:
        """A session with its tool calls inside; those that overlap another one are on a lane of their own."""
        fields = event.fields
        calls = self._calls.pop(self._session_key(event), [])
        self._held -= len(calls)
        place = self._tracks.place(_agents(event), "sessions", event.start, event.end)
        name = "session" if fields.get("status") == "success" else f"session, {fields.get('status', 'unfinished')}"
        slices = [sliced(place, name, arguments(fields))]
        reached = place.start
        for call in sorted(calls, key=lambda call: call.start):
            inside = place._replace(start=micros(call.start), end=micros(call.end))
            if reached <= inside.start and inside.end <= place.end:
                slices.append(sliced(inside, str(call.fields.get("tool", "tool")), arguments(call.fields)))
                reached = inside.end
            else:
                self._slice(_agents(event), "tool calls", call, str(call.fields.get("tool", "tool")))
        wanted = self._wanted(event.start, event.end)
        for slice_ in slices if wanted else ():
            self._write(slice_)
        if fields.get("status") == "success" and fields.get("partition") != "val":
            self._awaiting.add(str(fields.get("uid", "")), Generated(place, [] if wanted else slices))

    def _tool(self, event: Event) -> None:
        key = self._session_key(event)
        self._calls.setdefault(key, []).append(event)
        self._held += 1
        if "uid" not in event.fields:
            self._alone(key)
        while self._held > TOOL_CALLS:
            self._alone(next(iter(self._calls)))

    def _alone(self, key: tuple[Any, ...]) -> None:
        """The calls of a session of which no end is known."""
        for call in self._calls.pop(key):
            self._held -= 1
            self._slice(_agents(call), "tool calls", call, str(call.fields.get("tool", "tool")))

    @staticmethod
    def _session_key(event: Event) -> tuple[Any, ...]:
        return event.process, str(event.fields.get("uid", "")), event.fields.get("session")

    # --- levels and facts ---------------------------------------------------------------------------------------

    def _count(self, event: Event) -> None:
        if event.kind == "metrics":
            for which in ("mean", "max"):
                self._level(f"staleness, {which}", event.end, event.fields.get(STALENESS + which))
        elif event.name == "queue_groups":
            self._level(f"queue {event.fields.get('partition')}: {event.fields.get('state')}", event.end, event.value)
        elif event.name == "server_tokens" and isinstance(event.value, int | float):
            server = str(event.fields.get("server", ""))
            before, self._tokens[server] = self._tokens.get(server), (event.end, event.value)
            if before is not None and event.end > before[0] and event.value >= before[1]:  # less: it was restarted
                self._level(f"tokens/s {server}", event.end, (event.value - before[1]) / (event.end - before[0]))

    def _level(self, name: str, at: float, value: Any) -> None:
        if isinstance(value, int | float) and math.isfinite(value) and self._wanted(at, at):
            self._tracks.counter(name, at, value)

    def _state(self, event: Event) -> None:
        if event.name == "dropped":
            self._awaiting.dropped(str(event.fields.get("uid", "")))
        elif event.name in ("run", "restart") and self._wanted(event.start, event.end):
            place = self._tracks.place("Trainer", "run", event.start, event.end)
            self._tracks.instant(place, f"{event.name}: {event.value}"[:200], arguments(event.fields))

    def _wanted(self, start: float, end: float) -> bool:
        first, last = self._stretch
        return (start < last and end > first) or first <= start == end <= last


def _agents(event: Event) -> str:
    return "Agents" if event.process == TRAINER else f"Agents {event.process}"
