"""A producer ten times as fast as its consumer: what all of it takes, and what the consumer notices.

The service is one of its own, with one unit. First the consumer alone, at its pace, on rows that are there; then beside
a producer in a process of its own that puts ten times as much, and soon waits for storage most of the time. Sampled are
the files in the unit's directories, in memory and on disk, and the private memory of controller and unit.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.bars import Bar
from benchmarks.queue.storage_bytes import file_bytes, private_bytes
from benchmarks.queue.workload import Figures, Workload

MEMORY, DISK = 512 << 20, 1536 << 20
"""Budgets of the unit. With smaller ones the two interpreters alone would be more than a tenth."""

SEGMENT = 8 << 20
PUT = 16
"""Rows of a put, of 64 KiB each: 1 MiB."""

PACE = 12.5
"""Puts that the consumer reads and clears in a second."""

FACTOR = 10


def one_round(driver: Any, quick: bool, seed: int) -> dict[str, float]:
    """`taken` is the largest sum of files and private memory against both budgets; p50 of the consumer's get."""
    return asyncio.run(_round(10.0 if quick else 180.0))


async def _round(seconds: float) -> dict[str, float]:
    from transfer_queue.client import QueueClient
    from transfer_queue.service.queue_service import QueueService

    with tempfile.TemporaryDirectory(prefix="tq-bench-") as directory:
        service = QueueService(
            directory, units=1, unit_budget_bytes=MEMORY, segment_bytes=SEGMENT, spill_dir=directory,
            spill_budget_bytes=DISK,
        )  # fmt: skip
        address = await service.astart()
        client = await QueueClient.connect(address, name="consumer")
        meter = Meter(service)
        try:
            idle = Consumer(client, "idle")
            count = int(PACE * seconds / 4)
            for i in range(count):
                await client.put("idle", keys_of(i), columns_of(i))
            await idle.consume(until=count)
            producer = multiprocessing.get_context("spawn").Process(target=produce, args=(address, seconds))
            producer.start()
            busy = Consumer(client, "busy")
            measuring = asyncio.create_task(meter.measure())
            await busy.consume(seconds=seconds)
            measuring.cancel()
            stats = await client.stats()
            await asyncio.to_thread(producer.join, 30)
            producer.kill()
        finally:
            await client.close()
            await service.astop(clean=True)
    spilled, used = stats.units[0].spilled, stats.units[0].used
    return {
        "taken": meter.most / (MEMORY + DISK), "idle p50": median(idle.durations), "busy p50": median(busy.durations),
        "filled": (spilled + used) / (MEMORY + DISK), "consumed": float(busy.done),
    }  # fmt: skip


class Consumer:
    """Reads what was put, in order and at its pace, and clears it."""

    def __init__(self, client: Any, partition: str) -> None:
        self._client = client
        self._partition = partition
        self.durations: list[float] = []
        self.done = 0

    async def consume(self, *, until: int | None = None, seconds: float = float("inf")) -> None:
        began = time.perf_counter()
        while self.done != until and time.perf_counter() - began < seconds:
            await asyncio.sleep(max(0.0, began + self.done / PACE - time.perf_counter()))
            if until is None and self.done == 0:
                await self._there()
            asked = time.perf_counter()
            got = await self._client.get(self._partition, keys_of(self.done))
            self.durations.append(time.perf_counter() - asked)
            assert (got["x"].values[:, -1] == self.done).all()
            await self._client.clear(self._partition, keys_of(self.done))
            self.done += 1

    async def _there(self) -> None:
        """The producer has begun, and is ahead for good."""
        from transfer_queue.errors import NotFound

        while True:
            try:
                located = await self._client.lookup(self._partition, keys_of(20))
                if located.keys:
                    return
            except NotFound:
                pass
            await asyncio.sleep(0.1)


class Meter:
    """The most that files and processes took together."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._directories = [service._storage, Path(service._spill)]
        self.most = 0

    async def measure(self) -> None:
        while True:
            self.most = max(self.most, await asyncio.to_thread(self._now))
            await asyncio.sleep(0.25)

    def _now(self) -> int:
        return file_bytes(self._directories) + private_bytes(self._service.pids().values())


def produce(address: dict[str, str], seconds: float) -> None:
    """In a process of its own: puts at FACTOR times the consumer's pace, as far as there is room."""
    os.nice(1)
    asyncio.run(_produce(address, seconds))


async def _produce(address: dict[str, str], seconds: float) -> None:
    from transfer_queue.client import QueueClient
    from transfer_queue.errors import QueueError

    client = await QueueClient.connect(address, name="producer")
    began, i = time.perf_counter(), 0
    while time.perf_counter() - began < seconds + 1:
        await asyncio.sleep(max(0.0, began + i / (FACTOR * PACE) - time.perf_counter()))
        try:
            await asyncio.wait_for(client.put("busy", keys_of(i), columns_of(i)), seconds)
            i += 1
        except (QueueError, TimeoutError):
            continue
    await client.close()


def keys_of(put: int) -> list[str]:
    return [f"{put}-{i}" for i in range(PUT)]


def columns_of(put: int) -> dict[str, np.ndarray]:
    return {"x": np.full((PUT, 8192), put)}


def bars(figures: Figures) -> list[Bar]:
    found = {name: figures.median("ours", name) for name in figures.rounds["ours"]}
    return [
        Bar("overload: files and private memory at most, against the budgets", found["taken"], "ratio", 1.1, "at most"),
        Bar("overload: budgets filled at the end", found["filled"], "ratio"),
        Bar("overload: consumer's get, p50, against idle", found["busy p50"] / found["idle p50"], "ratio", 2.0,
            "at most"),
        Bar("overload: consumer's get, p50, idle", 1e3 * found["idle p50"], "ms"),
    ]  # fmt: skip


WORKLOADS = [Workload("overload", one_round, bars, sides=("ours",), rounds=1)]
