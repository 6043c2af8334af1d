"""Runs that are killed at any instruction and started again: is every prompt trained once, and none skipped?

    python -m benchmarks.resume --json FILE                      200 kills in virtual time, two minutes
    python -m benchmarks.resume --kills 10000 --jobs 2
    python -m benchmarks.resume --kills 0 --real 25              under Ray, with real processes: ten minutes
    python -m benchmarks.resume --kills 0 --stall                how long the training stands still for a save
    python -m benchmarks.resume --kills 0 --deterministic 40     to the bit (benchmarks/repeats.py): ten minutes

In virtual time each life of a run is a fork of this process, which saves it Python's start and the imports, and ends by
a signal that nothing can catch, after a random amount of CPU time: in a start, a step, a checkpoint, or between two
writes of a file. Trainer, queue, journal and checkpoints are those of any run; the model and the servers are simulated.

Judged by the trainer's own batch log (batches.jsonl), not by the queue. Of all prompts that were issued when the run
ended, each was trained in exactly one step that counts, or was still out, or was dropped. A failure prints its seed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from benchmarks.bars import Bar, report
from benchmarks.repeats import deterministic
from streamrl.config import StreamRLConfig
from streamrl.monitor.summary import read_summary
from streamrl.trainer.batch_log import read_batch_log
from streamrl.trainer.checkpoint import CheckpointStore, TrainerState
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


@dataclass(slots=True)
class Outcome:
    """Of any number of runs."""

    kills: int = 0
    runs: int = 0
    steps: int = 0
    undone: int = 0
    """Steps that a kill undid, so that they were trained again."""
    twice: int = 0
    lost: int = 0
    """Prompts issued and neither trained, nor dropped, nor out at the end."""
    wrong: int = 0
    """Steps that are missing, or did not train as many prompts as they should."""
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(*(getattr(self, name) + getattr(other, name) for name in Outcome.__slots__))

    def bars(self, what: str, kills: int) -> list[Bar]:
        return [
            Bar(f"{what}: kills", self.kills, "kills", kills),
            Bar(f"{what}: prompts trained twice", self.twice, "prompts", 0, "at most"),
            Bar(f"{what}: prompts lost", self.lost, "prompts", 0, "at most"),
            Bar(f"{what}: steps missing or not whole", self.wrong, "steps", 0, "at most"),
            Bar(f"{what}: runs", self.runs, "runs"),
            Bar(f"{what}: steps trained", self.steps, "steps"),
            Bar(f"{what}: steps that a kill undid", self.undone, "steps"),
            Bar(f"{what}: time", self.seconds, "s"),
        ]


def account(run: Path, steps: int, batch: int) -> Outcome:
    """What became of the prompts of a finished run."""
    lines = (run / "batches.jsonl").read_text().splitlines()
    trained = read_batch_log(run / "batches.jsonl")
    orders = [order for step in trained for order in step.orders]
    last = CheckpointStore(run / "checkpoints").load(steps)
    issued = set(range(last.next_order)) - set(last.outstanding)
    dropped = sum(read_summary(run).groups.dropped.values()) + read_summary(run).groups.dead
    whole = Counter(step.step for step in trained if len(step.orders) == batch)
    return Outcome(
        runs=1, steps=len(trained), undone=sum('"step"' in line for line in lines) - len(trained),
        twice=len(orders) - len(set(orders)), lost=max(0, len(issued - set(orders)) - dropped),
        wrong=sum(whole[step] != 1 for step in range(1, steps + 1)),
    )  # fmt: skip


def life(config: StreamRLConfig, output: Path, cpu_seconds: float | None) -> bool:
    """One life of a run; whether it was killed. Raises AssertionError for one that ended otherwise than at its end."""
    from streamrl.cli import _launch

    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        code = 70
        try:
            handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            if cpu_seconds is not None:
                signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF, and nobody handles it
            code = _launch(config)
        except BaseException as error:  # noqa: BLE001 - it goes to the file, and the parent looks at the code
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    status = os.waitpid(process, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return True
    assert status == 0, f"a life ended with status {status}:\n{output.read_text()[-3000:]}"
    return False


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


def steps_of(job: Job) -> int:
    return len(read_batch_log(job.path / "batches.jsonl")) if job.path.exists() else 0


def real(seed: int, kills: int) -> Outcome:
    """Under Ray: the whole job, or the training rank, which ends it."""
    rng, began, outcome, steps = random.Random(seed), time.monotonic(), Outcome(), 2 * kills + 6
    directory = Path(tempfile.mkdtemp(prefix="streamrl-resume-"))
    arguments = (SEPARATE, "trainer.save_freq=2", "trainer.val_before_train=false", "data.val_max_samples=4",
                 "actor_rollout_ref.actor.checkpoint.async_save=true")  # fmt: skip
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


def stall() -> list[Bar]:
    """Of a save of 25 million parameters with their moments (300 MB), one rank, on this machine's disk."""
    from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup
    from streamrl.workers.actor import ActorWorker
    from tests.workers.tiny import make_model, make_rows, settings

    async def measure(directory: Path) -> list[Bar]:
        model = make_model(directory / "model", hidden=512, layers=12)
        batch, rows = make_rows(2, 2)
        group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, settings(model), rows))
        await group.init_model()
        await group.update_actor(batch)
        store, found = CheckpointStore(directory / "checkpoints", keep=1), {}
        for step in range(1, 7):
            background = step > 3
            began = time.monotonic()
            draft = store.draft(step)
            await group.save_checkpoint(str(draft / "actor"), background=background)
            if not background:
                await store.seal(draft, TrainerState(step, 0))
            found[step] = time.monotonic() - began
            if background:
                await group.update_actor(batch)
                await group.checkpoint_written()
                await store.seal(draft, TrainerState(step, 0))
        size = sum(path.stat().st_size for path in store.path(6).rglob("*") if path.is_file())
        await group.close()
        at_once, beside = median(found[step] for step in (1, 2, 3)), median(found[step] for step in (5, 6))
        return [
            Bar("stall: checkpoint", size / 1e6, "MB"), Bar("stall: written at once", at_once, "s"),
            Bar("stall: async_save", beside, "s"),
            Bar("stall: async_save, share of it", beside / at_once, "", 0.5, "at most"),
        ]  # fmt: skip

    with tempfile.TemporaryDirectory(prefix="streamrl-resume-") as directory:
        return asyncio.run(measure(Path(directory)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resume", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--kills", type=int, default=200, help="in virtual time")
    parser.add_argument("--real", type=int, default=0, metavar="KILLS", help="of real processes, under Ray")
    parser.add_argument("--deterministic", type=int, default=0, metavar="KILLS", help="of runs that must end the same")
    parser.add_argument("--stall", action="store_true", help="measure what a save costs the training")
    parser.add_argument("--jobs", type=int, default=1, help="processes that kill side by side")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bars: list[Bar] = []
    if options.kills:
        share = -(-options.kills // options.jobs)
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            seeds = [(options.seed + 1_000 * job, share) for job in range(options.jobs)]
            outcome = sum(pool.starmap(virtual, seeds), Outcome())
        print(f"kills by kind: {dict(outcome.kinds)}", flush=True)
        bars += outcome.bars("virtual time", options.kills)
    if options.real:
        bars += real(options.seed, options.real).bars("real processes", options.real)
    if options.deterministic:
        bars += deterministic(options.seed, options.deterministic)
    if options.stall:
        bars += stall()
    return report(bars, options.json)


if __name__ == "__main__":
    sys.exit(main())
