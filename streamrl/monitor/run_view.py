"""What a person wants to know about a run at a glance, computed from its events: the state behind the terminal view."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamrl.monitor.events import Event
from streamrl.monitor.schema import CAUSES
from streamrl.monitor.summary import LABELS

PARTITION = "train"
"""The partition whose depth is shown."""

STATES = ("pending", "generating", "ready", "training")
RECENT_STEPS = 10
TOKEN_WINDOW = 10.0
EMA = 0.9

LONGEST_WHY = 100
"""Characters shown of the reason for which a group failed."""

LONGEST_NOTE = 1200
"""Characters shown of a note, and of what was asked and answered in a sample."""

PRINTED = ("note", "sample", "service")
"""States whose lines are also printed above the panel of a terminal."""

LONGEST_LEFT = 1e9
"""Seconds, 30 years: what is left is told as no more."""

BLOCKS = "▁▂▃▄▅▆▇█"

ENDED = ("finished", "interrupted", "failed")


class RunView:
    """Fed the events of a run in order. Everything it shows can be missing, and then it is not shown."""

    def __init__(self) -> None:
        self.status = "starting"
        self.step = 0
        self.total_steps = 0
        self.metrics: dict[str, Any] = {}
        self.validation: dict[str, float] = {}
        self.rewards: deque[float] = deque(maxlen=200)
        self.reward_ema: float | None = None
        self.depth: dict[str, int] = {}
        self.versions: dict[tuple[str, str], int] = {}
        self.restarts: dict[str, int] = {}
        self.left: dict[str, tuple[int, str]] = {}
        """Groups that left untrained: how many by kind of reason (stale, failed, dead, ...), and the last one's why."""
        self.part = ""
        """While starting: what came up last, and when."""
        self.last_event = 0.0
        self._began = 0.0
        self._open: dict[str, float] = {}  # the trainer's spans under way, by name
        self._finished: deque[tuple[float, dict[str, Any]]] = deque(maxlen=RECENT_STEPS + 1)
        self._token_samples: dict[str, deque[tuple[float, float]]] = {}  # (time, tokens since the first) by server
        self._token_counts: dict[str, float] = {}  # as the server told last

    # --- taking events in ---------------------------------------------------------------------------------------

    def feed(self, event: Event) -> str | None:
        """Take an event in; the line that a plain display prints for it, if any."""
        self._began = self._began or event.end
        self.last_event = max(self.last_event, event.end)
        if event.kind == "metrics":
            return self._step_metrics(event)
        if event.kind == "state":
            return self._state(event)
        if event.kind == "counter":
            self._counter(event)
        elif event.kind == "begin":
            self._open[event.name] = event.start
        elif event.kind == "span":
            self._open.pop(event.name, None)
        elif event.kind == "process" and event.name == "trainer" and not event.fields.get("rotated"):
            self._open.clear()
        return None

    def _step_metrics(self, event: Event) -> str:
        metrics = _numbers(event.fields)
        self.step, self.metrics = int(event.value or 0), metrics
        reward = metrics.get("critic/score/mean")
        if reward is not None:
            self.rewards.append(reward)
            before = reward if self.reward_ema is None else self.reward_ema
            self.reward_ema = metrics.get("reward/ema", EMA * before + (1 - EMA) * reward)
        self._finished.append((event.end, metrics))
        return self.line()

    def _state(self, event: Event) -> str | None:
        if event.name == "run":
            self.status = _clean(event.value)
            return f"run: {self.status}"
        if event.name == "prometheus":
            return f"metrics: {_clean(event.value)}, bearer key in {_clean(event.fields.get('key_file', '?'))}"
        if event.name == "total_steps" and isinstance(event.value, int):
            self.total_steps = event.value
        if event.name == "validation":
            numbers = _numbers(event.fields)
            core = {k: v for k, v in numbers.items() if k.startswith("val-core/") and not k.endswith("/std")}
            found = {k.removeprefix("val-core/"): v for k, v in core.items()}
            self.validation |= found
            shown = ", ".join(f"{_clean(name)} {value:.3f}" for name, value in found.items())
            return f"validation {_clean(event.value)}, step {_clean(event.fields.get('step', '?'))}: {shown}"
        if event.name == "dropped":
            self._group_left(str(event.value), str(event.fields.get("reason", "")))
        if event.name == "note":
            return f"note: {_clean(event.value, LONGEST_NOTE)}"
        if event.name == "service":
            return _clean(event.value, LONGEST_NOTE)
        if event.name == "sample":
            return self._sample(event)
        if event.name == "part":
            self.part = f"{_clean(event.value)} after {event.end - self._began:.1f} s"
            return f"starting: {self.part}"
        if event.name == "restart":
            role = _clean(event.fields.get("role", "process"))
            self.restarts[role] = self.restarts.get(role, 0) + 1
            return f"restarted {role}: {_clean(event.value)}"
        return None

    def _sample(self, event: Event) -> str:
        fields = event.fields
        question, answer = (_clean(fields.get(name, ""), LONGEST_NOTE) for name in ("input", "output"))
        head = f"validation sample, step {_clean(fields.get('step', '?'))}, {_clean(event.value)}"
        return f"{head}: score {_clean(fields.get('score', '?'))}\n  asked    {question}\n  answered {answer}"

    def _group_left(self, state: str, reason: str) -> None:
        kind, _, why = ("dead", "", reason) if state == "dead" else reason.partition(":")
        count, _ = self.left.get(kind, (0, ""))
        self.left[kind] = (count + 1, _clean(why.strip())[:LONGEST_WHY])

    def _counter(self, event: Event) -> None:
        if not isinstance(event.value, (int, float)):
            return
        fields, value = event.fields, event.value
        if event.name == "queue_groups" and fields.get("partition") == PARTITION:
            self.depth[str(fields.get("state"))] = int(value)
        elif event.name == "weight_version":
            self.versions[str(fields.get("role")), str(fields.get("engine"))] = int(value)
        elif event.name == "server_tokens":
            self._sampled(str(fields.get("server")), event.end, value)

    def _sampled(self, server: str, at: float, count: float) -> None:
        before = self._token_counts.get(server, count)
        samples = self._token_samples.setdefault(server, deque())
        more = count - before if count >= before else count  # less: it was restarted
        samples.append((at, (samples[-1][1] if samples else 0.0) + more))
        self._token_counts[server] = count
        while len(samples) > 2 and samples[0][0] < at - TOKEN_WINDOW:
            samples.popleft()

    # --- what it shows ------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens generated by all servers; where they do not tell, tokens trained."""
        ends = [(samples[0], samples[-1]) for samples in self._token_samples.values() if samples]
        newest = max((last[0] for _, last in ends), default=0.0)
        known = [
            (last[1] - first[1]) / (last[0] - first[0])
            for first, last in ends
            if last[0] > first[0] and last[0] >= newest - TOKEN_WINDOW  # else it is gone
        ]
        if known:
            return sum(known)
        return self.metrics.get("perf/throughput")

    @property
    def seconds_per_step(self) -> float | None:
        if len(self._finished) < 2:
            return self.metrics.get("timing_s/step")
        return (self._finished[-1][0] - self._finished[0][0]) / (len(self._finished) - 1)

    @property
    def seconds_left(self) -> float | None:
        each = self.seconds_per_step
        if each is None or not self.total_steps:
            return None
        return min(max(0, self.total_steps - self.step) * max(0.0, each), LONGEST_LEFT)

    @property
    def staleness(self) -> tuple[float, float] | None:
        """(mean, oldest) age of the rows of the last step, in versions."""
        name = "training/off_policy/trajectory_staleness"
        mean = self.metrics.get(f"{name}/mean")
        worst = self.metrics.get(f"{name}_worst/max", self.metrics.get(f"{name}/max"))
        return None if mean is None or worst is None else (mean, worst)

    @property
    def served_versions(self) -> list[int]:
        return sorted(version for (role, _), version in self.versions.items() if role == "rollout")

    def limit(self) -> str:
        """What the last steps spent most of their time on, in words."""
        recent = [m for _, m in list(self._finished)[-RECENT_STEPS:] if m.get("overlap/step_s", 0) > 0]
        total = sum(m["overlap/step_s"] for m in recent)
        if not total:
            return ""
        shares = {"training": sum(m.get("overlap/train_s", 0.0) for m in recent) / total}
        shares |= {LABELS[cause]: sum(m.get(f"lost_s/{cause}", 0.0) for m in recent) / total for cause in CAUSES}
        worst = max(shares, key=lambda name: shares[name])
        return f"{worst} takes {100 * shares[worst]:.0f} % of the last {len(recent)} steps"

    def under_way(self, now: float) -> str:
        """The innermost span that the trainer is in, with its age."""
        spans = {name: start for name, start in self._open.items() if name != "step"}
        if not spans or self.ended:
            return ""
        name = max(spans, key=lambda n: spans[n])
        return f"{LABELS.get(name, name.replace('_', ' '))} for {max(0.0, now - spans[name]):.1f} s"

    def line(self) -> str:
        """One line for the step that just ended."""
        return " | ".join([self._progress(), *(f"{name} {text}" for name, text in self.rows())])

    def _progress(self) -> str:
        return f"step {self.step}/{self.total_steps or '?'}"

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) of everything known, the same for the panel and the plain line."""
        rows: list[tuple[str, str]] = []
        if self.rewards:
            rows.append(("reward", f"{self.reward_ema:.3f} (last {self.rewards[-1]:.3f})"))
        if self.depth:
            rows.append(("queue", " ".join(f"{state} {self.depth.get(state, 0)}" for state in STATES)))
        if self.staleness:
            rows.append(("staleness", f"mean {self.staleness[0]:.1f} max {self.staleness[1]:.0f}"))
        if self.tokens_per_second is not None:
            rows.append(("tokens/s", f"{self.tokens_per_second:,.0f}"))
        trainer = self.versions.get(("trainer", ""))
        served = self.served_versions
        if trainer is not None or served:
            span = "–".join(str(v) for v in dict.fromkeys((served[0], served[-1]))) if served else "?"
            rows.append(("weights", f"trainer {'?' if trainer is None else trainer} servers {span}"))
        if self.seconds_per_step is not None:
            left = self.seconds_left
            more = f", {timedelta(seconds=round(left))} left" if left is not None else ""
            rows.append(("time", f"{self.seconds_per_step:.2f} s a step{more}"))
        if self.limit():
            rows.append(("limit", self.limit()))
        if self.left:
            left = [(f"{count} {_clean(kind)}", why) for kind, (count, why) in self.left.items()]
            rows.append(("dropped", ", ".join(f"{text} ({why})" if why else text for text, why in left)))
        if self.restarts:
            rows.append(("restarts", ", ".join(f"{role} {count}" for role, count in self.restarts.items())))
        return rows


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as block characters, scaled between their extremes."""
    values = values[-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((value - low) * scale)] for value in values)


def render(view: RunView, now: float) -> RenderableType:
    """The panel, at wall-clock time `now`."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    bar = ProgressBar(total=max(1, view.total_steps), completed=min(view.step, view.total_steps), width=40)
    grid.add_row(view._progress(), bar)
    for name, text in view.rows():
        grid.add_row(name, Text(text))
        if name == "reward":
            grid.add_row("", Text(sparkline(list(view.rewards)), style="cyan"))
    for name, value in view.validation.items():
        grid.add_row("validation", Text(f"{_clean(name)} {value:.3f}"))
    silent = now - view.last_event
    note = view.under_way(now) or (view.part if view.status == "starting" else "")
    if note:
        grid.add_row("now", Text(note))
    if silent > 10 and not view.ended and view.last_event:
        grid.add_row("silent", Text(f"no event for {silent:.0f} s: is the run alive?", style="bold red"))
    return Panel(grid, title=Text(f"StreamRL: {view.status}"), title_align="left", expand=False)


def _numbers(fields: Mapping[str, Any]) -> dict[str, float]:
    """The fields that are finite numbers."""
    return {k: v for k, v in fields.items() if isinstance(v, (int, float)) and math.isfinite(v)}


def _clean(value: object, longest: int = 200) -> str:
    """Text from a log, without control characters, short enough for a line."""
    return "".join(c if c.isprintable() else " " for c in str(value))[:longest]
