"""What clearing most rows of a put, or of many puts, leaves in storage.

The service is one of its own. Held is what its segment files have more than before (spare segments wait for writers
always); live is what the surviving rows took when they were put.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bars import Bar
from benchmarks.queue.storage_bytes import file_bytes
from benchmarks.queue.workload import Figures, Workload

SEGMENT = 8 << 20
DEADLINE = 20.0
"""Seconds after which what is held is what it is."""

ROW = 904
"""Bytes of a row in the second part: 896 of tokens and 8 of a dict, without where each begins."""


def one_round(driver: Any, quick: bool, seed: int) -> dict[str, float]:
    """Bytes held and live, and seconds from the end of the clear until the bar held."""
    return asyncio.run(_round(quick, seed))


async def _round(quick: bool, seed: int) -> dict[str, float]:
    from transfer_queue.service.queue_service import QueueService

    with tempfile.TemporaryDirectory(prefix="tq-bench-") as directory:
        service = QueueService(directory, units=2, segment_bytes=SEGMENT)
        address = await service.astart()
        try:
            queue = Held(address, service._storage)
            await queue.rest()
            return await queue.one_of_a_large_put(quick) | await queue.few_of_many(quick, seed)
        finally:
            await service.astop(clean=True)


class Held:
    """A queue whose files are measured."""

    def __init__(self, address: dict[str, str], storage: Path) -> None:
        self._address = address
        self._storage = storage
        self._empty = -1

    async def rest(self) -> None:
        """The spare segments of an empty queue are made."""
        while (now := file_bytes([self._storage], ".seg")) != self._empty:
            self._empty = now
            await asyncio.sleep(0.5)

    async def one_of_a_large_put(self, quick: bool) -> dict[str, float]:
        """63 of 64 rows of 256 MiB are cleared."""
        row = (64 << 10 if quick else 4 << 20) // 4
        keys = [f"k{i}" for i in range(64)]
        async with _closed(self._address) as client:
            await client.put("large", keys, {"x": np.ones((64, row), np.float32)})
            await client.clear("large", keys[1:])
        live = 4 * row
        held, seconds = await self._settled(live + SEGMENT)
        return {"large, held": held, "large, live": live, "large, seconds": seconds}

    async def few_of_many(self, quick: bool, seed: int) -> dict[str, float]:
        """99 % of the rows of many puts are cleared, at random."""
        rng, count = random.Random(seed), 6400 if quick else 128_000
        await self.rest()
        left = set(rng.sample(range(count), count // 100))
        async with _closed(self._address) as client:
            for at in range(0, count, 64):
                rows = range(at, at + 64)
                columns = {"tokens": [np.full(112, i) for i in rows], "info": [{"row": i} for i in rows]}
                await client.put("many", [f"k{i}" for i in rows], columns)
            gone = [f"k{i}" for i in range(count) if i not in left]
            for at in range(0, len(gone), 4096):
                await client.clear("many", gone[at : at + 4096])
        live = ROW * len(left)
        held, seconds = await self._settled(2 * live + 2 * SEGMENT)
        async with _closed(self._address) as client:
            keys = sorted(left)
            got = await client.get("many", [f"k{i}" for i in keys])
            assert [row["row"] for row in got["info"].rows_list()] == keys
        return {"many, held": held, "many, live": live, "many, seconds": seconds}

    async def _settled(self, bar: int) -> tuple[float, float]:
        """Bytes held once they are no more than `bar`, or at the deadline, and how long that took."""
        began = time.perf_counter()
        while True:
            held = max(1, file_bytes([self._storage], ".seg") - self._empty)
            if held <= bar or time.perf_counter() - began > DEADLINE:
                return float(held), time.perf_counter() - began
            await asyncio.sleep(0.05)


class _closed:
    """A client that is closed at the end, so that its segments are sealed."""

    def __init__(self, address: dict[str, str]) -> None:
        self._address = address

    async def __aenter__(self) -> Any:
        from transfer_queue.client import QueueClient

        self._client = await QueueClient.connect(self._address, name="clearing")
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()


def bars(figures: Figures) -> list[Bar]:
    median = {name: figures.median("ours", name) for name in figures.rounds["ours"]}
    return [
        Bar("clearing: 63 of 64 rows, held against live + 1 segment",
            median["large, held"] / (median["large, live"] + SEGMENT), "ratio", 1.0, "at most"),
        Bar("clearing: 63 of 64 rows, until then", median["large, seconds"], "s"),
        Bar("clearing: 99 % at random, held against 2 x live + 2 segments",
            median["many, held"] / (2 * median["many, live"] + 2 * SEGMENT), "ratio", 1.0, "at most"),
        Bar("clearing: 99 % at random, until then", median["many, seconds"], "s"),
    ]  # fmt: skip


WORKLOADS = [Workload("clearing", one_round, bars, sides=("ours",), rounds=3)]
