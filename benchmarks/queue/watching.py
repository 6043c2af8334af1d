"""Watching a partition of many groups: what one change costs, and what a waiting watcher costs others."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from itertools import pairwise
from statistics import quantiles
from typing import Any

import numpy as np

from benchmarks.bars import Bar
from benchmarks.queue.workload import Figures, Workload

CHUNK = 2000


def one_round(driver: Any, quick: bool, seed: int) -> dict[str, float]:
    """For each number of groups: seconds of a watch that finds one change, and of a snapshot of all. Then the one-row
    puts of another client, alone, while somebody watches the largest partition, and while another process takes
    snapshots of it again and again."""
    counts = (100, 400) if quick else (1_000, 16_000, 100_000)
    return asyncio.run(_round(driver, counts, 10 if quick else 50, 50 if quick else 1000, seed))


async def _round(driver: Any, counts: tuple[int, ...], changes: int, puts: int, seed: int) -> dict[str, float]:
    from transfer_queue.client import QueueClient

    watcher = await QueueClient.connect(driver.address, name="watcher")
    other = await QueueClient.connect(driver.address, name="other")
    figures: dict[str, float] = {}
    try:
        for count in counts:
            figures |= await _watch(driver, watcher, other, f"watched-{count}", count, changes, seed)
        alone = await _puts(other, puts, f"alone-{seed}")
        following = asyncio.create_task(_follow(watcher, f"watched-{counts[-1]}"))
        watched = await _puts(other, puts, f"beside-{seed}")
        following.cancel()
        with _reader(driver.address, f"watched-{counts[-1]}"):
            read = await _puts(other, puts // 5, f"read-{seed}")
        figures |= {"put beside a watcher, p50": watched[0], "put beside a watcher, p99": watched[1]}
        figures |= {"put alone, p50": alone[0], "put alone, p99": alone[1]}
        figures |= {"put beside snapshots, p50": read[0], "put beside snapshots, p99": read[1]}
    finally:
        await watcher.close()
        await other.close()
    return figures


async def _watch(
    driver: Any, watcher: Any, other: Any, partition: str, count: int, changes: int, seed: int
) -> dict[str, float]:
    from transfer_queue.net.messages import GroupSpec

    if partition not in driver.loaded:
        await other.open_partition(partition, tasks=[])
        for at in range(0, count, CHUNK):
            await other.admit(partition, [GroupSpec(f"g{i}", 1, i) for i in range(at, min(at + CHUNK, count))], {})
        driver.loaded.add(partition)
    began = time.perf_counter()
    seen = await watcher.watch(partition, -1)
    snapshot = time.perf_counter() - began
    times = []
    for i in range(changes):
        waiting = asyncio.create_task(watcher.watch(partition, seen.seq))
        await asyncio.sleep(0.002)
        began = time.perf_counter()
        await other.admit(partition, [GroupSpec(f"s{seed}-{i}", 1, count + i)], {})
        seen = await waiting
        times.append(time.perf_counter() - began)
        assert len(seen.groups) == 1, len(seen.groups)
    await other.drop(partition, [f"s{seed}-{i}" for i in range(changes)], "benchmark")
    return {f"one change among {count}": sorted(times)[len(times) // 2], f"snapshot of {count}": snapshot}


async def _follow(watcher: Any, partition: str) -> None:
    seen = (await watcher.watch(partition, -1)).seq
    while True:
        seen = (await watcher.watch(partition, seen)).seq


@contextlib.contextmanager
def _reader(address: dict[str, str], partition: str) -> Iterator[None]:
    """A process that takes one snapshot after the other."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_snapshots, args=(address, partition, there), daemon=True)
    process.start()
    there.close()
    try:
        assert here.recv() == "reading"
        yield
    finally:
        process.kill()
        process.join()


def _snapshots(address: dict[str, str], partition: str, parent: Any) -> None:
    asyncio.run(_read(address, partition, parent))


async def _read(address: dict[str, str], partition: str, parent: Any) -> None:
    from transfer_queue.client import QueueClient

    client = await QueueClient.connect(address, name="reader")
    await client.watch(partition, -1)
    parent.send("reading")
    while True:
        await client.watch(partition, -1)


async def _puts(client: Any, count: int, prefix: str) -> tuple[float, float]:
    """(p50, p99) seconds of one-row puts."""
    row = {"tokens": [np.arange(16)]}
    marks = [time.perf_counter()]
    for i in range(count):
        await client.put("watching-others", [f"{prefix}-{i}"], row)
        marks.append(time.perf_counter())
    await client.clear("watching-others", [f"{prefix}-{i}" for i in range(count)])
    cuts = quantiles([b - a for a, b in pairwise(marks)], n=100)
    return cuts[49], cuts[98]


def bars(figures: Figures) -> list[Bar]:
    median = {name: figures.median("ours", name) for name in figures.rounds["ours"]}
    one = [name for name in median if name.startswith("one change")]
    share = median["put beside a watcher, p50"] / median["put alone, p50"]
    return [
        *(Bar(f"watching: {name}", 1e3 * median[name], "ms") for name in median if name.startswith(("one", "snap"))),
        Bar("watching: one change, largest partition against smallest", median[one[-1]] / median[one[0]],
            "ratio", 1.5, "at most"),
        Bar("watching: put beside a watcher, p50, against alone", share, "ratio", 2.0, "at most"),
        Bar("watching: put beside a watcher, p99 (with the client's part)", 1e3 * median["put beside a watcher, p99"],
            "ms", 2.0, "at most"),
        *(Bar(f"watching: {name}", 1e3 * median[name], "ms") for name in median if name.startswith("put beside snap")),
    ]  # fmt: skip


WORKLOADS = [Workload("watching", one_round, bars, sides=("ours",), rounds=4)]
