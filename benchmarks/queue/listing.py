"""kv_list over partitions of growing size, as verl's ReplayBuffer polls it."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.bars import Bar
from benchmarks.queue.batches import against_peer
from benchmarks.queue.names import keys_of, tag_of
from benchmarks.queue.workload import Figures, Workload

CHUNK = 4000


def one_round(driver: Any, quick: bool, seed: int) -> dict[str, float]:
    """Seconds for the whole list by number of keys; the partitions are filled in the first round and stay."""
    figures = {}
    for count in (100, 400) if quick else (1_000, 16_000, 100_000):
        partition = f"listing-{count}"
        if partition not in driver.loaded:
            keys = keys_of(count)
            for at in range(0, count, CHUNK):
                part = keys[at : at + CHUNK]
                driver.tq.kv_batch_put(part, partition, tags=[tag_of(at + i) for i in range(len(part))])
            driver.loaded.add(partition)
        began = time.perf_counter()
        listed = driver.tq.kv_list(partition)
        figures[f"list {count} keys"] = time.perf_counter() - began
        assert len(listed[partition]) == count, (partition, len(listed[partition]))
    return figures


def bars(figures: Figures) -> list[Bar]:
    names = list(figures.rounds["ours"])
    times = [Bar(f"listing: {name}", 1e3 * figures.median("ours", name), "ms") for name in names]
    return times + against_peer("listing", figures, {})


WORKLOADS = [Workload("listing", one_round, bars, sides=("ours", "peer"), rounds=4)]
