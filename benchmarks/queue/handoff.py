"""From the last field of a group to the lease that waits for it: a producer, the controller, and this process.

The producer notes the (system-wide) monotonic clock right before its put and sends it along as a tag; this process
looks at the clock when its lease, which was parked before, returns with the references. So the put's copy counts too.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from statistics import quantiles
from typing import Any

import numpy as np

from benchmarks.bars import Bar
from benchmarks.queue.workload import Figures, Workload

SETTLE = 0.0015
"""Seconds between this process' word that it asks for a lease and the put, so that the lease is parked by then."""


def one_round(driver: Any, quick: bool, seed: int) -> dict[str, float]:
    trials = 40 if quick else 5_000
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    partition = f"handoff-{seed}"
    producer = context.Process(target=_produce, args=(driver.address, partition, trials, there), daemon=True)
    producer.start()
    there.close()
    try:
        latencies = asyncio.run(_consume(driver.address, partition, trials, here))
    finally:
        producer.join(20)
    cuts = quantiles(latencies, n=1000)
    return {"p50": cuts[499], "p99": cuts[989], "p99.9": cuts[998], "longest": max(latencies), "trials": trials}


async def _consume(address: dict[str, str], partition: str, trials: int, producer: Any) -> list[float]:
    from transfer_queue.client import QueueClient

    client = await QueueClient.connect(address, name="consumer")
    latencies = []
    try:
        assert producer.recv() == "open"
        for step in range(1, trials + 1):
            waiting = asyncio.create_task(client.lease(partition, "train", groups=1))
            await asyncio.sleep(0)  # the request is sent
            producer.send("waiting")
            leased = await waiting
            latencies.append(time.monotonic() - leased.groups[0].rows[0].tag["put_at"])
            await client.ack(partition, leased.token, [leased.groups[0].uid], step=step)
            await client.commit_step(partition, step)
    finally:
        await client.close()
    return latencies


def _produce(address: dict[str, str], partition: str, trials: int, consumer: Any) -> None:
    asyncio.run(_put_when_told(address, partition, trials, consumer))


async def _put_when_told(address: dict[str, str], partition: str, trials: int, consumer: Any) -> None:
    from transfer_queue.client import QueueClient
    from transfer_queue.net.messages import GroupSpec, SessionClose, TaskSpec

    client = await QueueClient.connect(address, name="producer")
    tasks = [TaskSpec("generate", "prompt", ttl=60.0), TaskSpec("train", "rows", "incarnation", fields=["responses"])]
    row = {"responses": [np.arange(512)], "log_probs": [np.zeros(512, np.float32)]}
    try:
        await client.open_partition(partition, tasks=tasks)
        consumer.send("open")
        for i in range(trials):
            uid, key = f"u{i}", f"u{i}_0_0"
            await client.admit(partition, [GroupSpec(uid, 1, i)], {})
            lease = await client.lease(partition, "generate", groups=1)
            assert consumer.recv() == "waiting"
            await asyncio.sleep(SETTLE)
            tags = [{"put_at": time.monotonic()}]
            await client.put(partition, [key], row, tags=tags, token=lease.token, closes=[SessionClose(uid, 0, [key])])
    finally:
        await client.close()


def bars(figures: Figures) -> list[Bar]:
    p50, p99, longest = (1e3 * figures.median("ours", name) for name in ("p50", "p99", "longest"))
    return [
        Bar("handoff: trials", figures.first("ours", "trials"), "trials", 5000),
        Bar("handoff: last field put to lease, p50", p50, "ms"),
        Bar("handoff: last field put to lease, p99", p99, "ms", 5.0, "at most"),
        Bar("handoff: last field put to lease, longest", longest, "ms"),
    ]


WORKLOADS = [Workload("handoff", one_round, bars, sides=("ours",), rounds=1)]
