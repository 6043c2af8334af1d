"""Kills in virtual time, in every mode: trainer, queue, journal and checkpoints are those of any run."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.resume.account import Outcome, account
from benchmarks.resume.life import life
from tests.runtime.conftest import VIRTUAL
from tests.runtime.jobs import Job

STEPS, BATCH = 60, 4
LONGEST_LIFE = 0.5
"""CPU seconds: half of it are about ten steps."""
KILLS_PER_RUN = 20
QUIET = (
    "monitor.terminal=false", "monitor.prometheus.enabled=false", "trainer.val_before_train=false",
    "actor_rollout_ref.rollout.n=2", "data.train_max_samples=100", "transfer_queue.segment_bytes=65536",
)  # fmt: skip
ASYNC_SAVE = ("actor_rollout_ref.actor.checkpoint.async_save=true", "actor_rollout_ref.actor.sim.save_seconds=0.7")
SEPARATE = "trainer.v1.trainer_mode=separate_async"
KINDS: dict[str, tuple[str, ...]] = {
    "sync": ("trainer.v1.trainer_mode=sync",),
    "separate_async": (SEPARATE,),
    "separate_async, written in the background": (SEPARATE, *ASYNC_SAVE),
    "separate_async, nothing dropped": (SEPARATE, "trainer.v1.sampler.max_off_policy_strategy=null", *ASYNC_SAVE),
    "colocate_async": ("trainer.v1.trainer_mode=colocate_async",),
}


def one_run(directory: Path, kind: str, rng: random.Random, kills: int) -> Outcome:
    """Killed until it is through, at most `kills` times."""
    from streamrl.cli import _checked

    kept = f"trainer.max_actor_ckpt_to_keep={rng.choice(['1', '2', 'null'])}"
    saved = f"trainer.save_freq={rng.randrange(1, 7)}"
    job = Job(
        directory, *VIRTUAL, *QUIET, *KINDS[kind], kept, saved, f"trainer.seed={rng.randrange(1000)}", steps=STEPS,
        batch=BATCH,
    )  # fmt: skip
    config, killed = _checked(job.arguments, None, like_verl=False), 0
    while life(config, job.output, rng.uniform(0.0, LONGEST_LIFE) if killed < kills else None):
        killed += 1
    [path] = job.runs.glob("2*")
    return account(path, STEPS, BATCH) + Outcome(kills=killed, kinds=Counter({kind: killed}))


def virtual(seed: int, kills: int) -> Outcome:
    """Runs, one after the other, until there were so many kills."""
    import streamrl.runtime.launch  # what every life needs, before the forks
    import streamrl.runtime.local_runtime
    import streamrl.runtime.session
    import streamrl.workers.sim_actor  # noqa: F401

    rng, outcome, began = random.Random(seed), Outcome(), time.monotonic()
    kinds = list(KINDS)
    while outcome.kills < kills:
        kind = kinds[outcome.runs % len(kinds)]
        directory = Path(tempfile.mkdtemp(prefix="streamrl-resume-"))
        found = one_run(directory, kind, rng, min(KILLS_PER_RUN, kills - outcome.kills))
        if found.twice or found.lost or found.wrong:
            print(f"seed {seed}, run {outcome.runs} ({kind}): {found}; see {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory)
        outcome += found
        print(f"{outcome.kills} kills, {outcome.runs} runs ({kind})", file=sys.stderr, flush=True)
    outcome.seconds = time.monotonic() - began
    return outcome
