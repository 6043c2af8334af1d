"""One seeded run of the whole queue with everything that may go wrong, from empty to all groups trained."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from tests.queue.chaos.job import Job
from tests.queue.chaos.loop import SeededLoop, run_seeded
from tests.queue.chaos.rows import STREAMED, partition_of
from tests.queue.chaos.training import TRAIN
from tests.queue.chaos.world import Faults, World
from transfer_queue.failpoints import FAILPOINTS

OFTEN = {
    "controller.before_append": 150, "controller.after_append": 150, "controller.before_reply": 200,
    "controller.before_flush": 200, "recovery.mid_replay": 100, "client.after_send": 250, "client.after_copy": 50,
    "client.after_commit": 50, "client.before_renew": 12, "unit.mid_make": 8, "unit.after_make": 8, "unit.mid_free": 6,
    "controller.before_sync": 24, "controller.after_sync": 24, "client.before_sync": 14,
    "snapshot.mid_prune": 3,
}  # fmt: skip
"""About how often a run passes a failpoint; the others a few times."""

NOT_HERE = {"unit.before_answer"}
"""Failpoints that no simulated process passes: all read by mapping."""

PATIENCE = 600.0
"""Virtual seconds in which all must be done once nothing goes wrong any more."""


@dataclass
class Outcome:
    """What a run saw; `digest` is that of all its events in order."""

    seed: int
    fired: Counter[str]
    deaths: Counter[str]
    lives: int
    records: int
    reads: int
    seconds: float
    trace: list[tuple]
    losses: int
    blackouts: int


def faults_of(seed: int) -> Faults:
    """One failpoint in turn for every seed, some others, and deaths at any moment."""
    rng = random.Random(seed)
    names = sorted(set(FAILPOINTS) - NOT_HERE)
    chosen = [names[seed % len(names)], *rng.sample(names, 4)]
    planned = [(name, 1 + rng.randrange(OFTEN.get(name, 2)) // 2) for name in chosen]
    return Faults(
        planned, kill_every=rng.choice([0.0, 3.0, 8.0]), break_every=rng.choice([0.0, 4.0]),
        repeats=rng.choice([0.0, 0.02, 0.1]), delay=rng.choice([0.0005, 0.005, 0.05]),
    )  # fmt: skip


def simulate(
    seed: int, *, groups: int = 10, keys: int = 6, rounds: int = 25, lose_every: float = 0.0, power_every: float = 0.0
) -> Outcome:
    """Raises what went wrong, with the seed. `lose_every`: see Faults; what was lost so is generated again. With
    `power_every` all partitions are of durability "journal", and nothing may be lost."""
    home = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="tq-sim-", dir=home) as directory:
        loop = SeededLoop(seed, disorder=(seed % 3) / 2, until=3 * PATIENCE, steps=2_000_000)
        faults = replace(faults_of(seed), lose_every=lose_every, power_every=power_every)
        world = World(loop, Path(directory), faults)
        job = Job(world, groups=groups, keys=keys, rounds=rounds, durable=power_every > 0)
        with world.patched():
            try:
                return run_seeded(loop, _run(world, seed, job))
            except Exception as error:
                tail = "\n".join(map(str, world.trace[-60:]))
                message = (
                    f"last events:\n{tail}\nseed {seed}: {type(error).__name__}: {error}\n"
                    f"simulate({seed}, lose_every={lose_every}, power_every={power_every}) replays it"
                )
                raise AssertionError(message) from error


async def _run(world: World, seed: int, job: Job) -> Outcome:
    try:
        return await _from_start_to_end(world, seed, job)
    finally:
        world.stop()


async def _from_start_to_end(world: World, seed: int, job: Job) -> Outcome:
    world.start()
    job.start()
    deadline = world.loop.time() + 60.0
    while not job.finished() and world.loop.time() < deadline:
        await asyncio.sleep(1.0)
        world.check()
    world.end_faults()
    deadline = world.loop.time() + PATIENCE
    while not job.finished():
        assert world.loop.time() < deadline, f"not done: {job.progress()}"
        await asyncio.sleep(1.0)
        world.check()
    await _judge(world, job)
    world.check()
    record = job.record
    return Outcome(
        seed, world.fired, world.deaths, world.checker.lives, world.checker.records, record.reads, world.loop.time(),
        world.trace, world.losses, world.blackouts,
    )  # fmt: skip


async def _judge(world: World, job: Job) -> None:
    """0 lost, 0 twice, 0 corrupt: by the clients' record, with a client that comes new."""
    record = job.record
    assert set(record.groups) == set(job.sizes), "not all groups were acknowledged"
    counts = Counter(uid for _, uids in record.batches for uid in uids)
    assert counts == dict.fromkeys(job.sizes, 1), f"trained: {counts}"
    missing = STREAMED - len(job.fetched)
    assert missing <= 2 * job.unheard or world.losses, f"{missing} rows were fetched by nobody, {job.unheard} unheard"
    judged = asyncio.Event()

    async def judge(process) -> None:
        client = await process.connect()
        await job.check_plain(client, [f"w{number}k{i}" for number in job.written for i in range(job.keys)])
        depth = (await client.stats()).partitions[TRAIN].depth
        assert depth["trained"] == job.groups, f"the queue counts {depth}"
        assert {partition_of(f"w{number}") for number in job.written} <= set(await client.list())
        await client.close()
        judged.set()

    world.spawn("judge", judge)
    while not judged.is_set():
        await asyncio.sleep(0.1)
        world.check()
