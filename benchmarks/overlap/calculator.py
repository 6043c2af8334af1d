"""The calculator job by mode and seed: does it learn, how much time does overlap save, what does staleness cost."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import mean, median, stdev

import psutil

from benchmarks.bars import Bar
from streamrl.monitor.events import read_events
from streamrl.monitor.metrics_log import read_metrics
from streamrl.monitor.summary import Summary, read_summary

ACCURATE = 0.9
SMOOTHED = 5
PARTS = ("learning", "speed", "stress", "waiting")
SLOW_TOOL = ("actor_rollout_ref.rollout.tools.calculator.latency_mean=20", "trainer.val_before_train=false")
SYNC = ("trainer.v1.trainer_mode=sync",)
CONSTANT = ("actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.optim.lr_scheduler_type=constant")
THREE_OLD = (
    "trainer.v1.separate_async.num_warmup_batches=3",
    "trainer.v1.separate_async.fixed_lag=true",
    "trainer.v1.sampler.max_off_policy_threshold=4",
)
PLAIN_CLIP = (
    "actor_rollout_ref.actor.clip_ratio_c=1e6",
    "actor_rollout_ref.actor.clip_ratio_high=0.2",
    "actor_rollout_ref.actor.target_kl=null",
    "actor_rollout_ref.actor.optim.staleness_aware=false",
)


def job(runs: str, seed: int, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "streamrl.main", "experiment=calculator", f"trainer.seed={seed}",
        f"trainer.runs_dir={runs}", "trainer.resume_mode=disable", *arguments,
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """What is kept of a run."""

    summary: Summary
    seconds_to_accurate: float
    """Training time until the samples of SMOOTHED steps scored ACCURATE on average; inf: never."""

    @property
    def cpu_bound(self) -> float:
        """The shortest time in which the cores could have done it / the time that it took."""
        return self.summary.cpu_bound_seconds / self.summary.measured_seconds


def train(seed: int, *arguments: str) -> Run:
    """One run of the job in a process of its own."""
    with tempfile.TemporaryDirectory() as runs:
        subprocess.run(job(runs, seed, *arguments), check=True, stdout=sys.stderr)
        path = Path(runs) / "latest"
        return Run(read_summary(path), seconds_to(ACCURATE, list(read_metrics(path))))


def seconds_to(score: float, lines: Sequence[Mapping[str, float]]) -> float:
    """From the lines of metrics.jsonl; see Run."""
    seconds = 0.0
    for place, line in enumerate(lines):
        seconds += line["overlap/step_s"]
        recent = [each["critic/score/mean"] for each in lines[max(0, place + 1 - SMOOTHED) : place + 1]]
        if len(recent) == SMOOTHED and mean(recent) >= score:
            return seconds
    return inf


def learning(of_seeds: list[Run]) -> list[Bar]:
    """All seeds must pass, so each figure is the worst one."""
    runs = [run.summary for run in of_seeds]
    before = [run.val_sampled_before or 0.0 for run in runs]
    return [
        Bar("seeds", len(runs), "runs", 5),
        Bar("sampled accuracy before, lowest", min(before), "share", 0.2),
        Bar("sampled accuracy before, highest", max(before), "share", 0.5, "at most"),
        Bar(
            "greedy accuracy before, highest",
            max(run.val_greedy_before or 1.0 for run in runs),
            "share",
            0.6,
            "at most",
        ),
        Bar("sampled accuracy after, lowest", min(run.val_sampled_after or 0.0 for run in runs), "share", 0.90),
        Bar("greedy accuracy after, lowest", min(run.val_greedy_after or 0.0 for run in runs), "share", 0.95),
        Bar("training time, longest", max(run.train_seconds for run in runs), "s", 180, "at most"),
        Bar("overlap efficiency, median", median(run.overlap_efficiency for run in runs), "share"),
    ]


def speed(pairs: list[tuple[Run, Run]]) -> list[Bar]:
    """(sync, separate_async) of the same seed, one after the other on the same machine. η takes the costs as they were
    while both worked on the same cores, which flatters it; hence the CPU bound beside it."""
    bars = [
        Bar("sync / separate_async training time", median(_seconds(a) / _seconds(b) for a, b in pairs), "ratio", 1.5)
    ]
    for name, runs in (("sync", [a for a, _ in pairs]), ("separate_async", [b for _, b in pairs])):
        summaries = [run.summary for run in runs]
        bars += [
            Bar(f"{name}: training time, median", median(map(_seconds, runs)), "s"),
            Bar(f"{name}: time to {ACCURATE:.0%} accuracy, median", median(r.seconds_to_accurate for r in runs), "s"),
            Bar(f"{name}: overlap efficiency, median", median(each.overlap_efficiency for each in summaries), "share"),
            Bar(f"{name}: CPU bound / time, median", median(run.cpu_bound for run in runs), "share"),
        ]
    after = [(_sampled(a), _sampled(b)) for a, b in pairs]
    differences = [b - a for a, b in after]
    bars += [
        Bar("sync: sampled accuracy after, lowest", min(a for a, _ in after), "share", 0.90),
        Bar(
            "sync: greedy accuracy after, lowest",
            min(a.summary.val_greedy_after or 0.0 for a, _ in pairs),
            "share",
            0.95,
        ),
        Bar("sampled accuracy after, separate_async less sync, mean", mean(differences), "share"),
    ]
    if len(differences) > 1:
        error = stdev(differences) / len(differences) ** 0.5
        bars.append(
            Bar("the same, in standard errors", abs(mean(differences)) / error if error else 0.0, "", 3, "at most")
        )
    return bars


def _seconds(run: Run) -> float:
    return run.summary.train_seconds


def _sampled(run: Run) -> float:
    return run.summary.val_sampled_after or 0.0


def stress(seeds: range) -> list[Bar]:
    """The bar is on the mean over the seeds: at a constant rate that high the accuracy goes up and down by a few points
    from step to step, in `sync` too."""
    sync = [_sampled(train(seed, *SYNC, *CONSTANT)) for seed in seeds]
    guarded = [_sampled(train(seed, *CONSTANT, *THREE_OLD)) for seed in seeds]
    plain = [_sampled(train(seed, *CONSTANT, *THREE_OLD, *PLAIN_CLIP)) for seed in seeds[:3]]
    return [
        Bar("stress: sync sampled accuracy after, mean", mean(sync), "share"),
        Bar("stress: sync sampled accuracy after, lowest", min(sync), "share"),
        Bar("stress: three versions old, sampled accuracy after, mean", mean(guarded), "share"),
        Bar("stress: three versions old, sampled accuracy after, lowest", min(guarded), "share"),
        Bar("stress: three versions old / sync, of the means", mean(guarded) / mean(sync), "ratio", 0.95),
        Bar(
            "stress: three versions old / sync, lowest seed",
            min(old / new for old, new in zip(guarded, sync, strict=True)),
            "ratio",
        ),
        Bar("stress: three versions old with a plain clip, mean of three seeds", mean(plain), "share"),
    ]


def waiting() -> list[Bar]:
    with tempfile.TemporaryDirectory() as runs:
        process = subprocess.Popen(job(runs, 1, *SYNC, *SLOW_TOOL), stdout=sys.stderr)
        try:
            pid = _trainer_that_waits(Path(runs) / "latest", process)
            trainer = psutil.Process(pid)
            before, began = sum(trainer.cpu_times()[:2]), time.monotonic()
            time.sleep(10.0)
            share = (sum(trainer.cpu_times()[:2]) - before) / (time.monotonic() - began)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    return [Bar("waiting: CPU of the trainer's process", share, "share", 0.05, "at most")]


def _trainer_that_waits(run: Path, process: subprocess.Popen) -> int:
    """Its pid, once it has issued its prompts and waits for the slow tool."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        events = list(read_events(run)) if run.exists() else []
        if any(event.name == "run" and event.value == "training" for event in events):
            time.sleep(4.0)
            return next(int(e.fields["pid"]) for e in events if e.kind == "process" and e.process == "trainer")
        time.sleep(0.2)
    raise RuntimeError(f"{run}: the job did not begin to train within 120 s")


def measure(parts: Sequence[str], count: int) -> list[Bar]:
    """`parts` of PARTS, over `count` seeds."""
    seeds = range(1, count + 1)
    bars: list[Bar] = []
    runs = {seed: train(seed) for seed in seeds} if {"learning", "speed"} & set(parts) else {}
    if "learning" in parts:
        bars += learning(list(runs.values()))
    if "speed" in parts:
        bars += speed([(train(seed, *SYNC), runs[seed]) for seed in seeds])
    if "stress" in parts:
        bars += stress(seeds)
    if "waiting" in parts:
        bars += waiting()
    return bars
