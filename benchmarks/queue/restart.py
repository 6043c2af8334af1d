"""A controller that tracks many rows is killed while a client writes; how long until it serves again.

The client notes each key that it got an answer for in a file of its own, synced to disk before it goes on; after the
restart every key in it must be there, with its tag.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bars import Bar
from benchmarks.queue.names import keys_of, tag_of
from benchmarks.queue.workload import Figures, Workload

CHUNK = 4096
FIELDS = [f"field{i}" for i in range(12)]
KILLS = 3


class Log:
    """Keys that were acknowledged, on disk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self.path = path

    def add(self, keys: list[str]) -> None:
        self._file.writelines(f"{key}\n" for key in keys)
        self._file.flush()
        os.fsync(self._file.fileno())

    def acknowledged(self) -> list[str]:
        return self.path.read_text().splitlines()


def one_round(driver: Any, quick: bool, seed: int) -> dict[str, float]:
    """Seconds from the signal to the first answer of the new controller; `found`: which part of the keys was there."""
    return asyncio.run(_round(20_000 if quick else 1_000_000, 1 if quick else KILLS))


async def _round(rows: int, kills: int) -> dict[str, float]:
    from transfer_queue.client import QueueClient
    from transfer_queue.service.queue_service import QueueService

    with tempfile.TemporaryDirectory(prefix="tq-restart-") as directory:
        service = QueueService(Path(directory) / "queue", units=1, unit_budget_bytes=1 << 30)
        address = await service.astart()
        client = await QueueClient.connect(address, name="filler")
        try:
            log = Log(Path(directory) / "log")
            for at in range(0, rows, CHUNK):
                await _put(client, log, keys_of(CHUNK, f"{at:x}-"), at)
            downtimes = [await _kill(service, client, log, i) for i in range(kills)]
            return {
                "downtime": max(downtimes),
                "found": await _found(client, log),
                "rows": float(len(log.acknowledged())),
            }
        finally:
            await client.close()
            await service.astop(clean=True)


async def _put(client: Any, log: Log, keys: list[str], at: int) -> None:
    columns = {name: np.arange(len(keys)) for name in FIELDS}
    await client.put("rows", keys, columns, tags=[tag_of(at + i) for i in range(len(keys))])
    log.add(keys)


async def _kill(service: Any, client: Any, log: Log, number: int) -> float:
    """Kill the controller amid single-row puts; seconds until the put that was under way is answered."""
    done = asyncio.Event()

    async def write() -> None:
        for i in range(1 << 30):
            await _put(client, log, [f"single-{number}-{i}"], i)
            if done.is_set():
                return

    writing = asyncio.create_task(write())
    await asyncio.sleep(0.5)
    os.kill(service.pids()["controller"], signal.SIGKILL)
    began = time.perf_counter()
    await asyncio.sleep(0)
    await client.stats()
    downtime = time.perf_counter() - began
    done.set()
    await writing
    return downtime


async def _found(client: Any, log: Log) -> float:
    listed = (await client.list("rows"))["rows"]
    acknowledged = log.acknowledged()
    return sum(bool(listed.get(key)) for key in acknowledged) / len(acknowledged)


def bars(figures: Figures) -> list[Bar]:
    ours = {name: figures.median("ours", name) for name in figures.rounds["ours"]}
    what = f"restart: controller with {ours['rows']:,.0f} rows"
    return [
        Bar(f"{what}, SIGKILL to first answer, worst", ours["downtime"], "s", 2.0, "at most"),
        Bar(f"{what}, acknowledged keys found", ours["found"], "of all", 1.0, always=True),
    ]


WORKLOADS = [Workload("restart", one_round, bars, sides=("ours",), rounds=1)]
