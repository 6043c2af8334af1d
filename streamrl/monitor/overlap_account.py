"""How close a run comes to its bound, and where the rest of the time went.

For a step that trained N samples of P groups, with K slots over all engines, mean slot time μ of a session, dropped
share q, T_train seconds of training and T_sync of weight sync, of which δ_t and δ_g are the shares in which the
trainer or generation stands still:

    T_gen = N·μ / (K·(1−q))     T* = max(T_train + δ_t·T_sync, T_gen + δ_g·T_sync)     η = T* / measured step time

A session that was cancelled counts for μ with the slot time it held until then, for its group counts for q.

η is `overlap_efficiency`. Where generation and training share cores, T_train and μ are what they were while the other
worked, which flatters η; beside it stands the CPU bound, all CPU seconds / cores. Every second of a step in which the
trainer's devices do not train is lost to exactly one cause, so training and the losses add up to the step.

This is the accounting itself; it knows no events and no clock. overlap.py feeds it from the event log.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl.monitor.schema import CAUSES, Cause

Interval = tuple[float, float]

PRECEDENCE: tuple[Cause, ...] = (
    "hand_off",
    "validation",
    "wait_order",
    "wait_data",
    "checkpoint",
    "sync",
    "bookkeeping",
)
"""Which cause an instant counts under when several hold (training always wins): what blocks the trainer itself comes
before what may run beside it, and waiting for data while validation holds the servers is validation's cost."""

STEADY_STEPS = 200
"""The steady efficiency looks at this many of the last steps."""

WARMUP_STEPS = 20
"""... and leaves out the first ones (at most a third of the run), in which the pipeline fills."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What happened in one step. Intervals may overlap and reach beyond the step; they are cut."""

    step: int
    start: float
    end: float
    train: list[Interval] = field(default_factory=list)
    waits: Mapping[Cause, list[Interval]] = field(default_factory=dict)
    sync_seconds: float = 0.0
    """T_sync, whether or not anyone stood still."""
    generation_stalled: float = 0.0
    """δ_g·T_sync."""
    generation_busy: float = 0.0
    """Seconds with at least one running request, summed over the engines."""
    engines: int = 0
    slots: int = 0
    """K, over all engines."""
    slot_seconds: float = 0.0
    """Slot time of the sessions that finished or were cancelled in this step, ..."""
    sessions: int = 0
    """... and how many those were: μ = slot_seconds / sessions."""
    samples: int = 0
    """N."""
    groups: int = 0
    groups_dropped: int = 0
    cpu_seconds: float = 0.0
    """Of all processes of the run on the trainer's node, ..."""
    cores: int = 0
    """... which has so many; 0: unknown."""


@dataclass(frozen=True, slots=True)
class StepOverlap:
    """The account of one step, or of the mean step of several. Seconds, except `efficiency`."""

    seconds: float
    t_train: float
    t_gen: float
    t_sync: float
    bound: float
    lost: dict[Cause, float]
    generation_busy: float
    """Of the mean engine, as the next two."""
    generation_stalled: float
    generation_idle: float
    cpu_bound: float = 0.0
    """CPU seconds / cores: no schedule could have been faster on these cores. 0: unknown."""

    @property
    def efficiency(self) -> float:
        return self.bound / self.seconds if self.seconds > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """As they stand in metrics.jsonl."""
        return {
            "overlap/efficiency": self.efficiency,
            "overlap/step_s": self.seconds,
            "overlap/bound_s": self.bound,
            "overlap/train_s": self.t_train,
            "overlap/gen_s": self.t_gen,
            "overlap/sync_s": self.t_sync,
            "overlap/generation_busy_s": self.generation_busy,
            "overlap/generation_stalled_s": self.generation_stalled,
            "overlap/generation_idle_s": self.generation_idle,
            **({"overlap/cpu_bound_s": self.cpu_bound} if self.cpu_bound else {}),
        } | {f"lost_s/{cause}": seconds for cause, seconds in self.lost.items()}


@dataclass(frozen=True, slots=True)
class RunOverlap:
    """The account of a whole run: sums over its steps, and the efficiency of the mean step against the mean bound."""

    steps: int
    seconds: float
    train_busy: float
    lost: dict[Cause, float]
    generation_busy: float
    generation_stalled: float
    generation_idle: float
    efficiency: float
    """η with the first fill of the pipeline counted as loss."""
    steady_efficiency: float
    """η of the last steps after warm-up, against the median step."""
    cpu_bound: float = 0.0
    """CPU seconds / cores, over the steps; 0: unknown."""

    def summary_fields(self) -> dict[str, Any]:
        """The part of summary.json that this account fills."""
        return {
            "overlap_efficiency": self.efficiency,
            "overlap_efficiency_steady": self.steady_efficiency,
            "measured_seconds": self.seconds,
            "cpu_bound_seconds": self.cpu_bound,
            "lost_seconds_by_cause": dict(self.lost),
            "busy_seconds": {"training": self.train_busy, "generation": self.generation_busy},
            "generation_waits": {"sync": self.generation_stalled, "idle": self.generation_idle},
        }


def length(intervals: Iterable[Interval]) -> float:
    """Seconds covered by the union of the intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def _cut(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    return [(max(a, start), min(b, end)) for a, b in intervals if min(b, end) > max(a, start)]


def attribute(record: StepRecord) -> tuple[float, dict[Cause, float]]:
    """(seconds of training, seconds lost by cause). They are not negative and add up to the step."""
    covered = _cut(record.train, record.start, record.end)
    train = reached = length(covered)
    lost: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    for cause in PRECEDENCE:
        covered += _cut(record.waits.get(cause, ()), record.start, record.end)
        total = length(covered)
        lost[cause] = max(0.0, total - reached)
        reached = max(reached, total)
    lost["unaccounted"] = max(0.0, record.end - record.start - reached)
    return train, lost


@dataclass(slots=True)
class _Sums:
    """Sums of records from which the mean step's account follows."""

    steps: int = 0
    seconds: float = 0.0
    train: float = 0.0
    sync: float = 0.0
    stalled: float = 0.0
    busy: float = 0.0
    slot_time: float = 0.0  # K × seconds
    slot_seconds: float = 0.0
    sessions: int = 0
    samples: int = 0
    groups: int = 0
    dropped: int = 0
    cpu_bound: float = 0.0
    lost: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    def add(self, record: StepRecord, train: float, lost: Mapping[Cause, float]) -> None:
        seconds = record.end - record.start
        self.steps += 1
        self.seconds += seconds
        self.train += train
        self.sync += record.sync_seconds
        self.stalled += record.generation_stalled
        self.busy += record.generation_busy / record.engines if record.engines else 0.0
        self.slot_time += record.slots * seconds
        self.slot_seconds += record.slot_seconds
        self.sessions += record.sessions
        self.samples += record.samples
        self.groups += record.groups
        self.dropped += record.groups_dropped
        self.cpu_bound += record.cpu_seconds / record.cores if record.cores else 0.0
        for cause, lost_seconds in lost.items():
            self.lost[cause] += lost_seconds

    def mean(self, default_slot_time: float = 0.0) -> StepOverlap:
        """The account of the mean step; `default_slot_time` is μ where no session finished."""
        n = max(1, self.steps)
        mu = self.slot_seconds / self.sessions if self.sessions else default_slot_time
        slots = self.slot_time / self.seconds if self.seconds > 0 else 0.0
        kept = self.groups / (self.groups + self.dropped) if self.groups else 1.0
        t_gen = self.samples / n * mu / (slots * kept) if slots else 0.0
        bound = max((self.train + self.lost["sync"]) / n, t_gen + self.stalled / n)
        return StepOverlap(
            seconds=self.seconds / n,
            t_train=self.train / n,
            t_gen=t_gen,
            t_sync=self.sync / n,
            bound=bound,
            lost={cause: seconds / n for cause, seconds in self.lost.items()},
            generation_busy=self.busy / n,
            generation_stalled=self.stalled / n,
            generation_idle=max(0.0, self.seconds - self.busy - self.stalled) / n,
            cpu_bound=self.cpu_bound / n,
        )


class Overlap:
    """The accounting. Invariant: training and the losses add up to the time of the steps, per step and over the run."""

    def __init__(self) -> None:
        self._all = _Sums()
        self._recent: deque[tuple[StepRecord, float, dict[Cause, float]]] = deque(maxlen=STEADY_STEPS)

    def add(self, record: StepRecord) -> StepOverlap:
        """The account of this step. Raises ValueError for a step that ends before it starts."""
        if record.end < record.start:
            raise ValueError(f"step {record.step} ends at {record.end}, before its start at {record.start}")
        known_mu = self._all.slot_seconds / self._all.sessions if self._all.sessions else 0.0
        train, lost = attribute(record)
        self._all.add(record, train, lost)
        self._recent.append((record, train, lost))
        one = _Sums()
        one.add(record, train, lost)
        return one.mean(known_mu)

    @property
    def run(self) -> RunOverlap:
        """The account up to now."""
        total = self._all
        return RunOverlap(
            steps=total.steps,
            seconds=total.seconds,
            train_busy=total.train,
            lost=dict(total.lost),
            generation_busy=total.busy,
            generation_stalled=total.stalled,
            generation_idle=max(0.0, total.seconds - total.busy - total.stalled),
            efficiency=total.mean().efficiency,
            steady_efficiency=self._steady_efficiency(),
            cpu_bound=total.cpu_bound,
        )

    @property
    def steady(self) -> StepOverlap:
        """The account of the mean of the last steps after warm-up; their median step is in `run.steady_efficiency`."""
        sums = _Sums()
        for record, train, lost in self._after_warmup():
            sums.add(record, train, lost)
        return sums.mean()

    def _after_warmup(self) -> list[tuple[StepRecord, float, dict[Cause, float]]]:
        skip = max(0, min(WARMUP_STEPS, self._all.steps // 3) - (self._all.steps - len(self._recent)))
        return list(self._recent)[skip:]

    def _steady_efficiency(self) -> float:
        seconds = [record.end - record.start for record, _, _ in self._after_warmup()]
        median = statistics.median(seconds) if seconds else 0.0
        return self.steady.bound / median if median > 0 else 0.0
