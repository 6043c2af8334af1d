"""Clients that nobody closed are closed when they are collected, with a warning."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable

import pytest

from transfer_queue.clients.async_client import QueueClient
from transfer_queue.clients.sync_client import SyncQueueClient
from transfer_queue.service.queue_service import QueueService


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def forget(clients: list) -> None:
    clients.clear()
    gc.collect()


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not holds() and time.monotonic() < end:
        threading.Event().wait(0.02)
    return holds()


def test_clients_that_were_dropped_leave_neither_threads_nor_descriptors(tmp_path):
    with QueueService(tmp_path / "q", storage_dir=tmp_path, unit_budget_bytes=1 << 24) as service:
        with SyncQueueClient(service.address, "first") as client:
            client.put("p", ["a"], {"x": [1]})
        before, threads = descriptors(), threading.active_count()
        for number in range(5):
            clients = [SyncQueueClient(service.address, f"dropped-{number}")]
            clients[0].put("p", ["a"], {"x": [1]})
            with pytest.warns(ResourceWarning, match=f"'dropped-{number}' was dropped without close"):
                forget(clients)
        assert eventually(lambda: descriptors() <= before and threading.active_count() <= threads)
        with SyncQueueClient(service.address, "last") as client:
            assert client.get("p", ["a"])["x"].rows_list() == [1]


def test_a_client_of_an_event_loop_that_was_dropped_is_closed_by_the_loop(tmp_path):
    async def drop(address: dict[str, str]) -> None:
        before = descriptors()
        clients = [await QueueClient.connect(address, name="dropped")]
        await clients[0].put("p", ["a"], {"x": [1]})
        assert descriptors() > before
        with pytest.warns(ResourceWarning, match="'dropped' was dropped"):
            forget(clients)
        assert await asyncio.to_thread(eventually, lambda: descriptors() <= before)

    with QueueService(tmp_path / "q", storage_dir=tmp_path, unit_budget_bytes=1 << 24) as service:
        asyncio.run(drop(service.address))
