"""The deterministic part: runs that are killed at any instruction end with the bits of one that was not.

Each life is a fork that ends after a random amount of CPU time, as there; but the model is real, and everything is
compared: weights, optimizer, generators, batches, metrics and validations.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from benchmarks.bars import Bar
from benchmarks.resume.life import life
from tests.runtime.jobs import Job
from tests.runtime.results import result

STEPS = 20
LONGEST_LIFE = 3.0
"""CPU seconds: a start takes about one, a step a third."""
NEEDED = (
    "streamrl.runtime.launch", "streamrl.runtime.local_runtime", "streamrl.runtime.session", "streamrl.workers.actor",
    "streamrl.workers.losses", "streamrl.workers.correction", "streamrl.workers.engine.fsdp2",
    "streamrl.rollout.torch.server", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.modeling_auto",
)  # fmt: skip
JOB = (
    "runtime=local", "trainer.n_gpus_per_node=1", "trainer.deterministic=true", "trainer.save_freq=2",
    "trainer.v1.trainer_mode=separate_async", "trainer.test_freq=5", "data.max_response_length=48",
    "actor_rollout_ref.rollout.tools.calculator.latency_mean=0.02", "monitor.terminal=false",
    "monitor.prometheus.enabled=false", "transfer_queue.segment_bytes=65536",
)  # fmt: skip


def servers(count: int) -> tuple[str, str]:
    rollout = "actor_rollout_ref.rollout"
    return f"{rollout}.num_replicas={count}", f"{rollout}.agent.num_workers={count}"


def deterministic(seed: int, kills: int) -> list[Bar]:
    """Runs of 1, 2 and 4 servers and agent workers, and of one each killed again and again, until there were so many
    kills, against the first."""
    from streamrl.cli import _checked
    from streamrl.trainer.batch_log import read_batch_log

    _import()
    rng, began, directory = random.Random(seed), time.monotonic(), Path(tempfile.mkdtemp(prefix="streamrl-repeats-"))

    def run(name: str, limit: int, *arguments: str) -> tuple[Path, int, float]:
        (directory / name).mkdir()
        job, begun, killed = Job(directory / name, *JOB, *arguments, steps=STEPS), time.monotonic(), 0
        config = _checked(job.arguments, None, like_verl=False)
        while life(config, job.output, rng.uniform(0.2, LONGEST_LIFE) if killed < limit else None):
            killed += 1
            done = len(read_batch_log(job.path / "batches.jsonl")) if job.path.exists() else 0
            print(f"{name}: kill {killed}, {done} steps in the batch log", file=sys.stderr, flush=True)
        return job.path, killed, time.monotonic() - begun

    path, _, seconds = run("undisturbed", 0)
    wanted, differ, points, killed_runs = result(path), 0, 0, 0
    for count in (2, 4):
        differ += result(run(f"{count} servers", 0, *servers(count))[0]) != wanted
    while points < kills:
        killed_runs += 1
        path, killed, _ = run(f"killed {killed_runs}", kills - points, *servers(1 + killed_runs % 2))
        points += killed
        if result(path) != wanted:
            differ += 1
            print(f"seed {seed}: {path} differs from {directory}/undisturbed", file=sys.stderr)
    if not differ:
        shutil.rmtree(directory)
    return [
        Bar("deterministic: distinct points of a kill", points, "kills", 30),
        Bar("deterministic: runs that ended otherwise", differ, "runs", 0, "at most"),
        Bar("deterministic: killed runs", killed_runs, "runs"),
        Bar("deterministic: runs of 2 and 4 servers and agent workers", 2, "runs"),
        Bar("deterministic: time of the undisturbed run", seconds, "s"),
        Bar("deterministic: time", time.monotonic() - began, "s"),
    ]


def _import() -> None:
    """What every life needs, before the forks; nothing of it starts a thread."""
    for name in NEEDED:
        import_module(name)
    import torch

    torch.set_num_threads(1)
