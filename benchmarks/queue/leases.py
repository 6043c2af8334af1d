"""Leasing 256 rows (32 groups of 8) out of partitions of growing size, and what a row of metadata takes in memory.

"service" is the controller's core in a process of its own, without sockets: the time of its `handle`. "client" is what
a client of the real service waits. The partition is filled by the verbs a run uses: admit, lease, put with the ends of
sessions.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np

from benchmarks.bars import Bar
from benchmarks.queue.names import tag_of
from benchmarks.queue.workload import Figures, Workload

SESSIONS, ROWS = 8, 256
FIELDS = [f"field{i}" for i in range(12)]
CHUNK = 128
"""Groups per request while a partition is filled."""


def one_round(driver: Any, quick: bool, seed: int) -> dict[str, float]:
    """Seconds by number of rows; `bytes a row` is private memory, of the largest partition."""
    figures: dict[str, float] = {}
    for rows in (1_024, 4_096) if quick else (1_000, 100_000, 1_000_000):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            p50, p99, nbytes = pool.apply(_service_side, (rows, 50 if quick else 500))
        figures |= {f"service, p50 of {rows}": p50, f"service, p99 of {rows}": p99, "bytes a row": nbytes}
    for rows in (1_024,) if quick else (1_000, 100_000):
        p50, p99 = asyncio.run(_client_side(driver, rows, 20 if quick else 200))
        figures |= {f"client, p50 of {rows}": p50, f"client, p99 of {rows}": p99}
    return figures


def _service_side(rows: int, times: int) -> tuple[float, float, float]:
    return asyncio.run(_service(rows, times))


async def _service(rows: int, times: int) -> tuple[float, float, float]:
    """p50 and p99 seconds of one lease, and private bytes a row."""
    from transfer_queue.local import LocalQueue
    from transfer_queue.net.messages import Hello, Lease, Nack, Request
    from transfer_queue.service.lifetime import give_back_large_tables

    give_back_large_tables()  # as a controller's process does
    queue = LocalQueue()
    client = queue.client("filler")
    await _fill(client, "warm", 2 * CHUNK * SESSIONS)
    before = _private_bytes()
    await _fill(client, "leased", rows)
    gc.collect()
    nbytes = (_private_bytes() - before) / rows
    answers: list[Any] = []
    core, send = queue.core, queue.core._send
    core._send = lambda name, response: answers.append(response) if name == "timed" else send(name, response)
    core.handle("timed", Request(1, Hello(version=1, run="", key="", name="timed")), queue.clock())
    durations = []
    for i in range(times):
        body = Lease("leased", "train", "timed", ROWS // SESSIONS)
        began = time.perf_counter()
        core.handle("timed", Request(2 * i + 2, body), queue.clock())
        durations.append(time.perf_counter() - began)
        leased = answers[-1].body
        give = Nack("leased", leased.token, [group.uid for group in leased.groups])
        core.handle("timed", Request(2 * i + 3, give), queue.clock())
        answers.clear()
    await queue.close()
    cuts = quantiles(durations, n=100)
    return cuts[49], cuts[98], nbytes


async def _client_side(driver: Any, rows: int, times: int) -> tuple[float, float]:
    from transfer_queue.client import QueueClient

    partition = f"leased-{rows}"
    client = await QueueClient.connect(driver.address, name="leaser")
    try:
        if partition not in driver.loaded:
            await _fill(client, partition, rows)
            driver.loaded.add(partition)
        durations = []
        for _ in range(times):
            began = time.perf_counter()
            leased = await client.lease(partition, "train", groups=ROWS // SESSIONS)
            durations.append(time.perf_counter() - began)
            await client.nack(partition, leased.token, [group.uid for group in leased.groups])
    finally:
        await client.close()
    cuts = quantiles(durations, n=100)
    return cuts[49], cuts[98]


async def _fill(client: Any, partition: str, rows: int) -> None:
    """Groups that are ready, whose rows have 41-character keys, 7 tags and 12 fields."""
    from transfer_queue.net.messages import GroupSpec, SessionClose, TaskSpec

    tasks = [TaskSpec("generate", "prompt", ttl=3600.0), TaskSpec("train", "rows", "incarnation", fields=FIELDS)]
    await client.open_partition(partition, tasks=tasks)
    groups = -(-rows // SESSIONS)
    for at in range(0, groups, CHUNK):
        uids = [f"{i:037x}" for i in range(at, min(at + CHUNK, groups))]
        await client.admit(partition, [GroupSpec(uid, SESSIONS, at + i) for i, uid in enumerate(uids)], {})
        lease = await client.lease(partition, "generate", groups=len(uids))
        keys = [f"{uid}_{s}_0" for uid in uids for s in range(SESSIONS)]
        columns = {name: np.arange(len(keys)) for name in FIELDS}
        closes = [SessionClose(uid, s, [f"{uid}_{s}_0"]) for uid in uids for s in range(SESSIONS)]
        tags = [tag_of(at * SESSIONS + i) for i in range(len(keys))]
        await client.put(partition, keys, columns, tags=tags, token=lease.token, closes=closes)


def _private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def bars(figures: Figures) -> list[Bar]:
    median = {name: figures.median("ours", name) for name in figures.rounds["ours"]}
    p50 = [value for name, value in median.items() if name.startswith("service, p50")]
    limits = {"service, p99 of 100000": 2.0}
    return [
        *(Bar(f"leases: {name} rows", 1e3 * median[name], "ms", limits.get(name), "at most")
          for name in median if name != "bytes a row"),
        Bar("leases: service, p50, largest partition against smallest", p50[-1] / p50[0], "ratio", 1.5, "at most"),
        Bar("leases: metadata of a row", median["bytes a row"], "bytes", 500.0, "at most"),
    ]  # fmt: skip


WORKLOADS = [Workload("leases", one_round, bars, sides=("ours",), rounds=1)]
