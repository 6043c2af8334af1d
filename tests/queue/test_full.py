"""A full directory: an error names it and says what to do, nothing is damaged, and it goes on with room again."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import numpy as np
import pytest

from transfer_queue.clients.sync_client import SyncQueueClient
from transfer_queue.errors import Invalid, QueueFull
from transfer_queue.local import LocalQueue
from transfer_queue.service.queue_service import QueueService

MIB = 1 << 20


def fill(place: Path) -> Path:
    """Somebody else's file takes what is left."""
    path = place / "other"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)) == 1 << 16:
            pass
    return path


def row(i: int) -> dict:
    return {"x": np.full((1, MIB // 8), i)}


def check(got: dict, rows: range) -> None:
    assert got["x"].values[:, 0].tolist() == got["x"].values[:, -1].tolist() == list(rows)


def put_rows(client: SyncQueueClient, numbers: range) -> None:
    for i in numbers:
        client.put("p", [f"k{i}"], row(i))


def test_processes_on_a_full_tmpfs_say_so_lose_nothing_and_go_on_when_there_is_room(small, tmp_path, monkeypatch):
    monkeypatch.setattr("transfer_queue.clients.async_client.SEGMENT_WAIT", 3.0)
    service = QueueService(
        tmp_path / "run", storage_dir=small, units=1, unit_budget_bytes=20 * MIB, segment_bytes=MIB,
        spill_budget_bytes=0,
    )  # fmt: skip
    with service, SyncQueueClient(service.address, "c") as client:
        for i in range(4):
            client.put("p", [f"k{i}"], row(i))
        pids = service.pids()
        other = fill(small)
        with pytest.raises(QueueFull) as error:
            put_rows(client, range(4, 20))
        for part in (str(small), "No space left on device", "Make room there", "storage_dir"):
            assert part in str(error.value)
        done = range(len(client.list("p")["p"]))
        check(client.get("p", [f"k{i}" for i in done]), done)
        other.unlink()
        for i in range(len(done), 14):
            client.put("p", [f"k{i}"], row(i))
        check(client.get("p", [f"k{i}" for i in range(14)]), range(14))
        assert service.pids() == pids


async def test_a_full_tmpfs_is_no_matter_while_the_disk_has_room(small, tmp_path, monkeypatch):
    monkeypatch.setattr("transfer_queue.clients.async_client.SEGMENT_WAIT", 3.0)
    monkeypatch.setattr("transfer_queue.local.choose_storage", lambda *_: (small, 0))
    async with LocalQueue(
        storage_dir=small, unit_budget_bytes=1 << 30, segment_bytes=MIB, spill_dir=tmp_path / "disk",
        spill_budget_bytes=1 << 30,
    ) as queue:  # fmt: skip
        client = queue.client("c")
        for i in range(40):
            await client.put("p", [f"k{i}"], row(i))
        check(await client.get("p", [f"k{i}" for i in range(40)]), range(40))


async def test_a_row_that_no_budget_can_hold_is_refused_at_once(tmp_path):
    async with LocalQueue(unit_budget_bytes=4 * MIB, segment_bytes=MIB) as queue:
        client = queue.client("c")
        with pytest.raises(Invalid, match=r"exceed the budget of every storage unit \(at most 4194304\).*raise"):
            await client.put("p", ["k"], {"x": np.zeros((1, 8 * MIB))})
        assert (await client.list()) == {}


async def test_a_put_into_a_full_queue_ends_after_its_wait_with_numbers_and_the_verbs_that_help(tmp_path):
    async with LocalQueue(unit_budget_bytes=4 * MIB, segment_bytes=MIB) as queue:
        client = queue.client("c")
        began = time.monotonic()
        full = None
        for i in range(100):
            try:
                await client.put("p", [f"k{i}"], {"x": np.zeros((1, MIB // 8))}, wait=0.2)
            except QueueFull as error:
                full = error
                break
        assert time.monotonic() - began < 10
    said = str(full)
    used, budget, free = map(int, re.findall(r"uses (\d+) of (\d+) bytes, (\d+) are free", said)[0])
    assert (used + free, budget) == (budget, 4 * MIB)
    assert f"whole segments (of {MIB} bytes" in said
    assert all(verb in said for verb in ("kv_clear", "drop", "ack", "wait=")), said


def test_a_directory_without_room_for_the_budget_is_refused_before_anything_starts(small, tmp_path):
    with pytest.raises(Invalid, match=f"{small} has .* MiB free .*lower unit_budget_bytes, enlarge it .*storage_dir"):
        QueueService(tmp_path / "run", storage_dir=small, units=2, unit_budget_bytes=20 * MIB)
