"""The whole state of a run as its pages show it: fed events, lines of metrics.jsonl and what the queue says.

    state = RunState(config)
    for event in tail.poll(): state.feed(event)
    state.metrics_line(line);  state.queue.ask(stats, now)
    state.snapshot(now)                        # everything, for a browser that knows nothing
    state.delta(now)                           # what changed since the last delta, for those that had it

A delta holds small parts whole, if they changed, and of growing ones what was added. Snapshot and deltas have the same
keys, so a browser treats both alike, but for charts, which it replaces or continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from streamrl.dashboard.state import alerts, pipeline
from streamrl.dashboard.state.fleet import Fleet
from streamrl.dashboard.state.health import Health, health
from streamrl.dashboard.state.queue_view import QueueView
from streamrl.dashboard.state.segments import seconds_by
from streamrl.dashboard.state.series import Series, StepTable
from streamrl.dashboard.state.timeline import Timeline
from streamrl.dashboard.state.verdict import STEPS, Situation, Verdict, verdict
from streamrl.monitor.events import Event
from streamrl.monitor.metrics_log import VALIDATION
from streamrl.monitor.run_view import RunView

TRAINER = "trainer"
"""The process that tells of the run as a whole."""

SHOWN = 800
"""Points of each chart in a snapshot."""

FRESH = 200
"""Points that a delta may add; more come at once only while a recorded run is read: then everybody gets a snapshot."""

CHARTED = (
    "critic/score/mean", "reward/ema", "perf/throughput", "perf/generated_tokens_per_s", "perf/time_per_step",
    "overlap/efficiency", "training/off_policy/token_staleness/p50", "training/off_policy/token_staleness/max",
    "training/off_policy/trajectory_staleness/mean", "training/off_policy/trajectory_staleness_worst/max",
    "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac", "response_length/mean",
    "response_length/clip_ratio", "waste/ratio", "actor/lr", "actor/loss", "groups/zero_variance", "groups/trained",
    "groups/dropped", "training/rollout_probs_diff_mean", "rollout_corr/kl", "weights/seconds/pause", "overlap/sync_s",
)  # fmt: skip
"""Metrics that the live stream carries for every step; all others are asked for (`/api/steps`)."""


class RunState:
    """Invariant: it depends on what it was fed, in order, and on the times it is given; on nothing else."""

    def __init__(self, config: Mapping[str, Any] | None = None, name: str = "") -> None:
        self.name = name
        self.config = config or {}
        self.view = RunView()
        self.queue = QueueView()
        self.fleet = Fleet()
        self.timeline = Timeline()
        self.steps = StepTable()
        self.tokens = Series(("per_second",))
        self.validations: list[dict[str, Any]] = []
        self.notes: list[dict[str, Any]] = []
        self.error = ""
        self.damaged = 0
        self.last_sign = 0.0
        """When the log last grew, as its reader saw."""
        self.heartbeats = False
        self.host = ""
        """Of the reader's machine: pids of processes there can be looked at."""
        self._sent: dict[str, bytes] = {}
        self._encoder = msgspec.json.Encoder()
        self._new_steps: list[int] = []
        self._cut = False

    # --- taking in ----------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        self.timeline.feed(event)
        self.fleet.feed(event)
        if event.kind == "span" and event.process != TRAINER:
            return  # sessions and the like: nearly all events are
        self.view.feed(event)
        self.queue.feed(event)
        if event.name == "heartbeat":
            self.heartbeats = True
        elif event.name == "server_tokens":
            rate = self.view.tokens_per_second
            if rate is not None:
                self.tokens.add(event.end, round(rate, 3))
        elif event.kind == "state" and event.name in ("note", "part", "run"):
            self.notes.append({"time": event.end, "kind": event.name, "text": str(event.value)[:2000]})
            del self.notes[:-300]

    def metrics_line(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, of a step or of a validation."""
        if VALIDATION in line:
            self.validations.append(dict(line))
            return
        step = int(line["step"])
        if self.steps.steps and self.steps.steps[-1] >= step:
            self._cut = True
        self.steps.add(step, {k: v for k, v in line.items() if k != "step"})
        self._new_steps.append(step)

    def metrics_anew(self) -> None:
        """metrics.jsonl was replaced (a resume cut it): it comes again from its beginning."""
        self.steps, self.validations, self._new_steps, self._cut = StepTable(), [], [], True

    def processes(self, alive: Callable[[int], bool]) -> None:
        """Look which processes of this machine live."""
        for process in self.fleet.processes.values():
            if process.host == self.host:
                was, process.alive = process.alive, alive(process.pid)
                if was is not False and not process.alive:
                    self.timeline.ended(process.name)

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        trainer = self.config.get("trainer")
        v1 = trainer.get("v1") if isinstance(trainer, Mapping) else None
        return str(v1.get("trainer_mode", "separate_async")) if isinstance(v1, Mapping) else "separate_async"

    def health(self, now: float) -> Health:
        trainer = self.fleet.processes.get(TRAINER)
        return health(
            status=self.view.status, process_alive=trainer.alive if trainer is not None else None,
            last_sign=self.last_sign, heartbeats=self.heartbeats, now=now,
        )  # fmt: skip

    def verdict(self, now: float) -> Verdict:
        return verdict(self.situation(now))

    def situation(self, now: float) -> Situation:
        recent = self.timeline.sessions.recent(256)
        spent = sum(s.end - s.start for s in recent)
        partial = self.timeline.partial(now)
        return Situation(
            health=self.health(now), status=self.view.status, now=now, part=self.view.part, error=self.error,
            mode=self.mode, steps=self.steps.last(STEPS), partial=seconds_by(partial) if partial else {},
            waits_now=partial[-1].what if partial else "", depth=self.queue.depth.get("train", {}),
            credit=self.queue.credit.get("train", 0), feeder_waits=self.timeline.open_since("wait_credit") is not None,
            tools=self.timeline.calls,
            tool_share=sum(s.tool_seconds for s in recent) / spent if spent else 0.0,
            queue_share=sum(s.queue_seconds for s in recent) / spent if spent else 0.0,
        )  # fmt: skip

    def overview(self, now: float) -> dict[str, Any]:
        view, condition = self.view, self.health(now)
        found = self.verdict(now)
        served = view.served_versions
        last = self.steps.last(1)
        metrics = last[0] if last else {}
        oldest = self.queue.oldest.get("train", {})
        return {
            "name": self.name, "status": view.status, "mode": self.mode, "part": view.part, "error": self.error,
            "health": {"condition": condition.condition, "why": condition.why, "since": round(condition.since, 1)},
            "verdict": {
                "tone": found.tone, "cause": found.cause, "headline": found.headline, "detail": found.detail,
                "advice": found.advice, "share": _short(found.share),
                "shares": {name: _short(share) for name, share in found.shares.items()},
            },
            "step": max(view.step, int(metrics.get("step", 0))), "total": view.total_steps,
            "seconds_per_step": _short(view.seconds_per_step), "seconds_left": _short(view.seconds_left),
            "tokens_per_second": _short(view.tokens_per_second),
            "reward": metrics.get("critic/score/mean"), "reward_ema": metrics.get("reward/ema"),
            "efficiency": metrics.get("overlap/efficiency"),
            "trainer_version": view.versions.get(("trainer", "")),
            "served": [served[0], served[-1]] if served else None,
            "ready": self.queue.depth.get("train", {}).get("ready"),
            "out": self.queue.out(), "credit": self.queue.credit.get("train", 0),
            "oldest_training": oldest.get("training") if self.queue.depth.get("train", {}).get("training") else None,
            "staleness": list(view.staleness) if view.staleness else None,
            "dropped": sum(self.queue.dropped.get("train", {}).values()), "dead": len(self.queue.dead.get("train", {})),
            "trainer_waits": self.timeline.waits_now(now), "waits_since": self.waits_since(now),
            "validation": dict(view.validation),
            "alerts": alerts.alerts(self, now, condition), "damaged": self.damaged,
        }  # fmt: skip

    def waits_since(self, now: float) -> float | None:
        """Since when the trainer does what it does at this moment."""
        parts = self.timeline.partial(now)
        return round(parts[-1].start, 1) if parts else None

    def parts(self, now: float) -> dict[str, Any]:
        """The small parts, each sent whole when it changed."""
        ends = {"first": self.timeline.first, "last": round(self.timeline.last, 1)}
        return {
            "overview": self.overview(now), "queue": self.queue.page(), "pipeline": pipeline.stages(self, now),
            "fleet": self.fleet.page(), "timeline": ends,
            "notes": self.notes[-50:], "validations": self.validations[-200:], "names": self.steps.names,
        }  # fmt: skip

    def snapshot(self, now: float) -> bytes:
        charts = {"depth": self.queue.series.shown(SHOWN), "tokens": self.tokens.shown(SHOWN)}
        return self._encoder.encode(
            {"now": now, **self.parts(now), "charts": charts, "steps": self.steps.shown(CHARTED, SHOWN)}
        )

    def delta(self, now: float) -> bytes | None:
        """What changed since the last delta; empty for nothing, None if it is too much for one."""
        self.queue.settle()
        depth, tokens = self.queue.series.take(), self.tokens.take()
        fresh, self._new_steps = self._new_steps, []
        cut, self._cut = self._cut, False
        parts = self._changed(now)
        if cut or len(depth) > FRESH or len(tokens) > FRESH or len(fresh) > FRESH:
            return None
        charts = {name: rows for name, rows in (("depth", depth), ("tokens", tokens)) if rows}
        if charts:
            parts["charts"] = charts
        if fresh:
            rows = self.steps.last(len(fresh))
            parts["steps"] = {"step": fresh} | {name: [row.get(name) for row in rows] for name in CHARTED}
        return self._encoder.encode({"now": now, **parts}) if parts else b""

    def _changed(self, now: float) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for name, part in self.parts(now).items():
            encoded = self._encoder.encode(part)
            if self._sent.get(name) != encoded:
                self._sent[name] = encoded
                changed[name] = msgspec.Raw(encoded)
        return changed


def _short(value: float | None) -> float | None:
    """Three digits: what changes by less is not sent again."""
    return None if value is None else float(f"{value:.3g}")
