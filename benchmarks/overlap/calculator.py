"""The calculator job by mode and seed: does it learn, how much time does overlap save, what does staleness cost."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import psutil

from benchmarks.bars import Bar
from streamrl.monitor.events import read_events
from streamrl.monitor.summary import Summary, read_summary

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


def train(seed: int, *arguments: str) -> Summary:
    """One run of the job in a process of its own."""
    with tempfile.TemporaryDirectory() as runs:
        subprocess.run(job(runs, seed, *arguments), check=True, stdout=sys.stderr)
        return read_summary(Path(runs) / "latest")


def learning(runs: list[Summary]) -> list[Bar]:
    """All seeds must pass, so each figure is the worst one."""
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


def speed(pairs: list[tuple[Summary, Summary]]) -> list[Bar]:
    """(sync, separate_async) of the same seed."""
    return [
        Bar("sync: training time, median", median(sync.train_seconds for sync, _ in pairs), "s"),
        Bar("separate_async: training time, median", median(run.train_seconds for _, run in pairs), "s"),
        Bar(
            "sync / separate_async training time",
            median(a.train_seconds / b.train_seconds for a, b in pairs),
            "ratio",
            1.5,
        ),
        Bar(
            "sync: sampled accuracy after, lowest",
            min(sync.val_sampled_after or 0.0 for sync, _ in pairs),
            "share",
            0.90,
        ),
        Bar(
            "sync: greedy accuracy after, lowest", min(sync.val_greedy_after or 0.0 for sync, _ in pairs), "share", 0.95
        ),
    ]


def stress(seeds: range) -> list[Bar]:
    """The bar is on the mean over the seeds: at a constant rate that high the accuracy goes up and down by a few points
    from step to step, in `sync` too."""
    sync = [train(seed, *SYNC, *CONSTANT).val_sampled_after or 0.0 for seed in seeds]
    guarded = [train(seed, *CONSTANT, *THREE_OLD).val_sampled_after or 0.0 for seed in seeds]
    plain = [train(seed, *CONSTANT, *THREE_OLD, *PLAIN_CLIP).val_sampled_after or 0.0 for seed in seeds[:3]]
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
