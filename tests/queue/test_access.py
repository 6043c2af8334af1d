"""How a client gets at the bytes of units: what it has not heard of is gone, not an accident."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from transfer_queue.access import UnitAccess
from transfer_queue.client import QueueClient
from transfer_queue.errors import SegmentGone
from transfer_queue.net.messages import Segment, UnitInfo
from transfer_queue.service import QueueService
from transfer_queue.storage.arena import WriteArena
from transfer_queue.storage.segments import segment_id


def test_a_segment_of_a_unit_that_nobody_knows_any_more_is_given_back() -> None:
    """Granted by a controller that died before the client could ask where the unit is."""
    access = UnitAccess("c", "0" * 64)
    with pytest.raises(SegmentGone, match="storage unit 0 has not registered"):
        access.open_for_write(Segment(7, 0, 1 << 16))
    arena = WriteArena(access.open_for_write)
    arena.add([Segment(7, 0, 1 << 16)])
    assert arena.room() == 0
    assert arena.sealed() == [7]


def test_where_a_unit_is_is_asked_again_once_it_was_started_anew() -> None:
    access = UnitAccess("c", "0" * 64)
    access.learn([UnitInfo(3, "/nowhere", "ipc:///nowhere", "n", incarnation=7)])
    assert access.knows(segment_id(3, 7, 0))
    assert not access.knows(segment_id(3, 8, 0))
    assert not access.knows(segment_id(4, 7, 0))


@pytest.mark.chaos
async def test_who_only_writes_finds_a_unit_that_was_started_again_at_another_port(tmp_path) -> None:
    service = QueueService(tmp_path / "q", storage_dir=tmp_path, units=1, unit_budget_bytes=16 << 20, bind="127.0.0.1")
    client = await QueueClient.connect(await service.astart(), name="elsewhere", force_remote=True)
    try:
        for i in range(3):
            value = np.full((1, 500), i)
            await asyncio.wait_for(client.put("p", [f"k{i}"], {"x": value}), 15)
            restarts = service.restarts()["unit-0"]
            os.kill(service.pids()["unit-0"], signal.SIGKILL)
            async with asyncio.timeout(15):
                while service.restarts()["unit-0"] == restarts or "unit-0" not in service.pids():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        got = await client.get("p", ["k0", "k1", "k2"])
        assert got["x"].values[:, 0].tolist() == [0, 1, 2]
    finally:
        await client.close()
        await service.astop(clean=True)
