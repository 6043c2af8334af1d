"""A storage unit that is killed while rows are put and read, also from other nodes and from disk, costs a pause."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from benchmarks.queue.unit_death import SEGMENT, Load
from transfer_queue.client import QueueClient
from transfer_queue.service.queue_service import QueueService


async def test_a_unit_killed_under_load_costs_a_pause_and_no_row(tmp_path):
    service = QueueService(
        tmp_path / "run", units=1, unit_budget_bytes=16 * SEGMENT, segment_bytes=SEGMENT, spill_dir=tmp_path,
        spill_budget_bytes=256 * SEGMENT,
    )  # fmt: skip
    address = await service.astart()
    clients = [await QueueClient.connect(address, name=f"c{i}", force_remote=i == 2) for i in range(3)]
    load = Load(seed=7)
    try:
        tasks = [asyncio.create_task(load.write(clients[0]))]
        tasks += [asyncio.create_task(load.read(client)) for client in clients[1:]]
        await load.until_more(300)
        load.killed = time.perf_counter()
        os.kill(service.pids()["unit-0"], signal.SIGKILL)
        await load.until_more(50)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in clients[1:]:
            await load.read_all(client)
        assert (await clients[0].stats()).units[0].spilled > 100 * (1 << 16)
        assert service.restarts()["unit-0"] == 1
        assert load.wrong == load.errors == 0
        assert max(load.longest) < 10  # about a second on an idle machine
    finally:
        for client in clients:
            await client.close()
        await service.astop(clean=True)
    assert os.listdir(tmp_path) == ["run"]
