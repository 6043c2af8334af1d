"""A thousand clients in four processes, each with an identity, keys and rows of its own, each asking more than once a
second; and what is left of them in the controller when they have gone.

The queue is one of its own: every writer holds a segment, so for so many the segments are small. Two of the processes
close their clients, the others just end.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from statistics import quantiles
from typing import Any

import numpy as np

from benchmarks.bars import Bar
from benchmarks.queue.workload import Figures, Workload

PROCESSES = 4

PERIOD = 0.8
"""Seconds between two requests of a client."""

SEGMENT = 64 << 10

SETTLE = 10.0
"""Seconds that the controller has to notice that processes have ended."""


def one_round(driver: Any, quick: bool, seed: int) -> dict[str, float]:
    """Seconds per request; requests per second of the slowest client; descriptors and threads of the controller after,
    as a share of those before. Raises if any request fails or gives other rows than were put."""
    from transfer_queue.service.queue_service import QueueService

    count, requests = (48, 3) if quick else (1_000, 12)
    with tempfile.TemporaryDirectory(prefix="tq-bench-") as directory:
        service = QueueService(directory, unit_budget_bytes=2 * count * SEGMENT, segment_bytes=SEGMENT)
        address = service.start()
        try:
            controller = service.pids()["controller"]
            before = _descriptors(controller), _threads(controller)
            connected, latencies, rates = _together(address, count, requests, seed)
            after = _after(controller, before)
        finally:
            service.stop(clean=True)
    cuts = quantiles(latencies, n=100)
    return {
        "request, p50": cuts[49], "request, p99": cuts[98], "all are connected": connected, "clients": count,
        "requests a second, slowest client": min(rates), "descriptors": after[0] / before[0],
        "threads": after[1] / before[1],
    }  # fmt: skip


def _together(address: dict[str, str], count: int, requests: int, seed: int) -> tuple[float, list[float], list[float]]:
    """Seconds until all are connected, all latencies, and the rate of each client."""
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for i in range(PROCESSES):
        here, there = context.Pipe()
        names = [f"client-{n}" for n in range(i, count, PROCESSES)]
        process = context.Process(
            target=_process, args=(address, names, requests, seed, i % 2 == 0, there), daemon=True
        )
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    assert all(pipe.recv() == "imported" for pipe in pipes)
    began = time.perf_counter()
    for phase in ("connect", "ask"):
        for pipe in pipes:
            pipe.send(phase)
        if phase == "connect":
            assert all(pipe.recv() == "connected" for pipe in pipes)
            connected = time.perf_counter() - began
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(30)
    return connected, [x for latencies, _ in results for x in latencies], [x for _, rates in results for x in rates]


def _process(address: dict[str, str], names: list[str], requests: int, seed: int, polite: bool, parent: Any) -> None:
    from transfer_queue.service.lifetime import allow_many_files

    allow_many_files()
    asyncio.run(_clients(address, names, requests, seed, polite, parent))


async def _clients(
    address: dict[str, str], names: list[str], requests: int, seed: int, polite: bool, parent: Any
) -> None:
    from transfer_queue.client import QueueClient

    parent.send("imported")
    assert parent.recv() == "connect"
    clients = await asyncio.gather(*(QueueClient.connect(address, name=name) for name in names))
    parent.send("connected")
    assert parent.recv() == "ask"
    asking = [_ask(client, i / len(clients), requests, seed) for i, client in enumerate(clients)]
    found = await asyncio.gather(*asking)
    parent.send(([x for latencies, _ in found for x in latencies], [rate for _, rate in found]))
    if not polite:
        os._exit(0)
    await asyncio.gather(*(client.close() for client in clients))


async def _ask(client: Any, phase: float, requests: int, seed: int) -> tuple[list[float], float]:
    """Put a row and get it, by turns; (latencies, requests per second)."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(phase * PERIOD)
    row, latencies, began = np.arange(16) + seed, [], loop.time()
    for i in range(requests):
        asked = loop.time()
        key = f"{client.name}-{i // 2}"
        if i % 2 == 0:
            await client.put("clients", [key], {"tokens": [row + i]}, tags=[{"i": i}])
        else:
            got = await client.get("clients", [key])
            assert np.array_equal(got["tokens"].rows_list()[0], row + i - 1), (key, got)
        latencies.append(loop.time() - asked)
        await asyncio.sleep(max(0.0, began + (i + 1) * PERIOD - loop.time()))
    return latencies, requests / (loop.time() - began)


def _after(controller: int, before: tuple[int, int]) -> tuple[int, int]:
    """Descriptors and threads as soon as they are what they were, or when it should long have noticed."""
    end = time.monotonic() + SETTLE
    while True:
        now = _descriptors(controller), _threads(controller)
        if now <= before or time.monotonic() > end:
            return now
        time.sleep(0.1)


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def bars(figures: Figures) -> list[Bar]:
    median = {name: figures.median("ours", name) for name in figures.rounds["ours"]}
    return [
        Bar("clients: connected at once", median["clients"], "clients", 1_000),
        Bar("clients: requests of the slowest", median["requests a second, slowest client"], "1/s", 1.0),
        Bar("clients: until all are connected", median["all are connected"], "s"),
        Bar("clients: request, p50", 1e3 * median["request, p50"], "ms"),
        Bar("clients: request, p99", 1e3 * median["request, p99"], "ms"),
        Bar("clients: descriptors of the controller, after / before", median["descriptors"], "ratio", 1.0, "at most"),
        Bar("clients: threads of the controller, after / before", median["threads"], "ratio", 1.0, "at most"),
    ]  # fmt: skip


WORKLOADS = [Workload("clients", one_round, bars, sides=("ours",), rounds=1)]
