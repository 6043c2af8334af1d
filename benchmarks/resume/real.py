"""Kills of real processes, under Ray."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.resume.account import Outcome, account
from streamrl.trainer.batch_log import read_batch_log
from tests.runtime.jobs import Job

BATCH = 4


def steps_of(job: Job) -> int:
    return len(read_batch_log(job.path / "batches.jsonl")) if job.path.exists() else 0


def real(seed: int, kills: int) -> Outcome:
    """Under Ray: the whole job, or the training rank, which ends it."""
    rng, began, outcome, steps = random.Random(seed), time.monotonic(), Outcome(), 2 * kills + 6
    directory = Path(tempfile.mkdtemp(prefix="streamrl-resume-"))
    arguments = (
        "trainer.v1.trainer_mode=separate_async", "trainer.save_freq=2", "trainer.val_before_train=false",
        "data.val_max_samples=4", "actor_rollout_ref.actor.checkpoint.async_save=true",
    )  # fmt: skip
    job = Job(directory, *arguments, f"trainer.seed={rng.randrange(1000)}", steps=steps, batch=BATCH, seconds=300.0)
    done = lives = 0
    while outcome.kills < kills:
        lives += 1
        process = job.start()
        done = min(steps - 2, done + rng.randrange(0, 4))
        try:
            if rng.random() < 0.8:
                job.wait_until(lambda step=done: steps_of(job) >= step, f"step {done}")
            time.sleep(rng.uniform(0.0, 2.0))
            ranks = [child.pid for child in job.processes() if "RankActor" in child.name()]
        except (AssertionError, psutil.NoSuchProcess) as error:
            if process.poll() is None or lives > 3 * kills:
                raise
            print(f"a life ended by itself, and the next one goes on: {error}", file=sys.stderr)  # no memory for Ray
            continue
        if outcome.kills % 2 and ranks:
            os.kill(rng.choice(ranks), signal.SIGKILL)
            process.wait(120)
        else:
            job.kill()
        outcome.kills += 1
        done = steps_of(job)
        print(f"kill {outcome.kills}: {done} steps in the batch log", file=sys.stderr, flush=True)
    job.start()
    job.finish()
    outcome += account(job.path, steps, BATCH)
    outcome.seconds = time.monotonic() - began
    shutil.rmtree(directory)
    return outcome
