"""One row at a time: what an agent loop does when a trajectory ends; and the same with each on the disk first."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.bars import Bar
from benchmarks.queue.batches import against_peer
from benchmarks.queue.data import one_row
from benchmarks.queue.names import keys_of, tag_of
from benchmarks.queue.workload import Figures, Workload

AT_ONCE = 64


def one_round(driver: Any, quick: bool, seed: int) -> dict[str, float]:
    """Seconds per operation, over new rows each time, which are cleared at the end."""
    count = 20 if quick else 400
    tq, partition = driver.tq, "single"
    keys = keys_of(2 * count, "single")
    one_by_one, concurrent = keys[:count], keys[count:]
    row, tag = one_row(seed), tag_of(seed)

    began = time.perf_counter()
    for key in one_by_one:
        tq.kv_put(key, partition, fields=row, tag=tag)
    put = time.perf_counter()
    for key in one_by_one:
        tq.kv_put(key, partition, tag=tag)
    tagged = time.perf_counter()
    for key in one_by_one:
        tq.kv_batch_get([key], partition)
    got = time.perf_counter()
    together = asyncio.run(_concurrently(tq, concurrent, partition, row, tag))
    tq.kv_clear(keys, partition)
    return {
        "put": (put - began) / count, "put of a tag": (tagged - put) / count, "get": (got - tagged) / count,
        f"put, {AT_ONCE} at once": together / len(concurrent),
    }  # fmt: skip


async def _concurrently(tq: Any, keys: list[str], partition: str, row: Any, tag: Any) -> float:
    """AT_ONCE workers, each of which puts its share one by one."""

    async def worker(share: list[str]) -> None:
        for key in share:
            await tq.async_kv_put(key, partition, fields=row, tag=tag)

    began = time.perf_counter()
    await asyncio.gather(*(worker(keys[i::AT_ONCE]) for i in range(AT_ONCE)))
    return time.perf_counter() - began


def one_durable_round(driver: Any, quick: bool, seed: int) -> dict[str, float]:
    """The same in a partition with durability "journal": each put waits for two syncs, which it shares if it can."""
    count = 20 if quick else 200
    tq, partition = driver.tq, "durable"
    keys = keys_of(3 * count, "durable")
    one_by_one, concurrent = keys[:count], keys[count:]
    row, tag = one_row(seed), tag_of(seed)
    tq.get_client().queue.open_partition(partition, tasks=[], durability="journal")
    tq.kv_put(keys[-1], partition, fields=row, tag=tag)

    began = time.perf_counter()
    for key in one_by_one:
        tq.kv_put(key, partition, fields=row, tag=tag)
    put = time.perf_counter() - began
    together = asyncio.run(_concurrently(tq, concurrent, partition, row, tag))
    tq.kv_clear(keys, partition)
    return {"durable put": put / count, f"durable put, {AT_ONCE} at once": together / len(concurrent)}


def durable_bars(figures: Figures) -> list[Bar]:
    names = ("durable put", f"durable put, {AT_ONCE} at once")
    return [Bar(f"single: {name}, ours", 1 / figures.median("ours", name), "rows/s") for name in names]


def bars(figures: Figures) -> list[Bar]:
    names = ("put", f"put, {AT_ONCE} at once")
    rates = [Bar(f"single: {name}, ours", 1 / figures.median("ours", name), "rows/s") for name in names]
    return rates + against_peer("single", figures, dict(zip(names, (8.0, 10.0), strict=True)))


WORKLOADS = [
    Workload("single", one_round, bars, sides=("ours", "peer")),
    Workload("durable", one_durable_round, durable_bars, sides=("ours",), rounds=3),
]
