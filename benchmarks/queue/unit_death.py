"""SIGKILL of the only storage unit while rows are put, read from another node and read from disk.

The service is one of its own, with so little memory that most rows are spilled. A writer and two readers, one of which
takes the way of other nodes, call one verb after another. Figures: the longest time that a call took which was in
flight at a kill or began after it; how long after the kill every row that was acknowledged has been read.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.bars import Bar
from benchmarks.queue.workload import Figures, Workload

SEGMENT = 1 << 20
ROWS = 8
"""Rows of a put, of 64 KiB each."""

RING = 2048
"""Rows there are at most, 128 MiB: eight times the memory of the unit. Then the same are written again."""


def one_round(driver: Any, quick: bool, seed: int) -> dict[str, float]:
    """Seconds; `answered` and `right` are the shares of calls that did not raise and of rows that were what was put."""
    return asyncio.run(_round(2 if quick else 5, seed))


async def _round(kills: int, seed: int) -> dict[str, float]:
    from transfer_queue.client import QueueClient
    from transfer_queue.service.queue_service import QueueService

    with tempfile.TemporaryDirectory(prefix="tq-bench-") as directory:
        service = QueueService(
            directory, units=1, unit_budget_bytes=16 * SEGMENT, segment_bytes=SEGMENT, spill_budget_bytes=1 << 30,
            spill_dir=directory,
        )  # fmt: skip
        address = await service.astart()
        clients = [await QueueClient.connect(address, name=f"c{i}", force_remote=i == 2) for i in range(3)]
        load = Load(seed)
        try:
            tasks = [asyncio.create_task(load.write(clients[0]))]
            tasks += [asyncio.create_task(load.read(client)) for client in clients[1:]]
            recovered = []
            for _ in range(kills):
                await load.until_more(200)
                load.killed = time.perf_counter()
                os.kill(service.pids()["unit-0"], signal.SIGKILL)
                await load.read_all(clients[2])
                recovered.append(time.perf_counter() - load.killed)
            spilled = (await clients[0].stats()).units[0].spilled
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for client in clients:
                await client.close()
            await service.astop(clean=True)
    return {
        "longest call": max(load.longest), "all rows readable": max(recovered), "spilled bytes": float(spilled),
        "answered": 1 - load.errors / load.calls, "right": 1 - load.wrong / load.seen,
    }  # fmt: skip


class Load:
    """What the clients do, and what they saw."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.committed = self.calls = self.errors = self.seen = self.wrong = 0
        self.killed = float("inf")
        self.longest = [0.0]
        self._more = asyncio.Event()

    async def write(self, client: Any) -> None:
        while True:
            first = self.committed % RING
            rows = np.repeat(np.arange(first, first + ROWS)[:, None], 8192, axis=1)
            if await self._timed(client.put("p", [f"k{i}" for i in range(first, first + ROWS)], {"x": rows})):
                self.committed += ROWS
                self._more.set()

    async def read(self, client: Any) -> None:
        while True:
            if self.committed:
                await self._check(client, self._rng.sample(range(min(RING, self.committed)), 4))
            await asyncio.sleep(0.001)

    async def until_more(self, rows: int) -> None:
        """The writer has put so many more; a kill before that would find it idle."""
        want = self.committed + rows
        while self.committed < want:
            self._more.clear()
            await self._more.wait()

    async def read_all(self, client: Any) -> None:
        for at in range(0, committed := min(RING, self.committed), 64):
            await self._check(client, list(range(at, min(at + 64, committed))))

    async def _check(self, client: Any, rows: list[int]) -> None:
        got = await self._timed(client.get("p", [f"k{i}" for i in rows]))
        if got:
            self.seen += len(rows)
            self.wrong += int((got["x"].values != np.asarray(rows)[:, None]).any(axis=1).sum())

    async def _timed(self, call: Any) -> Any:
        from transfer_queue.errors import QueueError

        self.calls += 1
        began = time.perf_counter()
        try:
            return await call
        except QueueError:
            self.errors += 1
            return None
        finally:
            if time.perf_counter() >= self.killed:
                self.longest.append(time.perf_counter() - began)


def bars(figures: Figures) -> list[Bar]:
    def worst(name: str) -> float:
        return max(figures.rounds["ours"][name])

    return [
        Bar("unit death: longest call of a reader or writer", worst("longest call"), "s", 3.0, "at most"),
        Bar("unit death: until all rows were read from another node", worst("all rows readable"), "s"),
        Bar("unit death: calls that were answered, not refused", min(figures.rounds["ours"]["answered"]), "ratio"),
        Bar(
            "unit death: rows read that were what was put",
            min(figures.rounds["ours"]["right"]),
            "ratio",
            1.0,
            always=True,
        ),
        Bar("unit death: spilled", figures.median("ours", "spilled bytes") / 2**20, "MiB", 1.0),
    ]


WORKLOADS = [Workload("unit-death", one_round, bars, sides=("ours",), rounds=3)]
