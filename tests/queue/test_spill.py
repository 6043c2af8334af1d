"""What memory has no room for goes to disk and is read from there, also over restarts."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from transfer_queue.errors import Corrupt, Invalid, QueueFull, SegmentGone
from transfer_queue.local import LocalQueue
from transfer_queue.storage.place import choose_spill
from transfer_queue.storage.unit_files import UnitFiles

SEGMENT = 64 << 10
BUDGET = 8 * SEGMENT


def queue_at(tmp_path: Path, spill_budget: int = 1 << 30, **options) -> LocalQueue:
    return LocalQueue(
        unit_budget_bytes=BUDGET, segment_bytes=SEGMENT, spill_dir=tmp_path / "spill", spill_budget_bytes=spill_budget,
        **options,
    )  # fmt: skip


async def put(client, rows: range, partition: str = "p") -> None:
    """One segment each."""
    for i in rows:
        await client.put(partition, [f"k{i}"], {"x": np.full((1, SEGMENT // 8), i)})


async def check(client, rows: range, partition: str = "p") -> None:
    got = await client.get(partition, [f"k{i}" for i in rows])
    assert got["x"].values[:, 0].tolist() == got["x"].values[:, -1].tolist() == list(rows)


def units(queue: LocalQueue):
    return queue.core._grants.stats()[0]


async def test_what_memory_has_no_room_for_lies_on_disk_and_is_read_there(tmp_path):
    async with queue_at(tmp_path) as queue:
        client = queue.client("c")
        await put(client, range(40))
        await check(client, range(40))
        await check(queue.client("other"), range(40))
        found = units(queue)
        assert found.used <= BUDGET
        assert found.spilled >= 32 * SEGMENT
        assert len(list((tmp_path / "spill").glob("*.seg"))) == found.spilled // SEGMENT


async def test_the_oldest_go_first(tmp_path):
    async with queue_at(tmp_path) as queue:
        client = queue.client("c")
        await put(client, range(10))
        located = await client.lookup("p", [f"k{i}" for i in range(10)])
        on_disk = [
            queue._unit.files.disk is not None and b.segment in queue._unit.files.disk.sizes for b in located.blocks
        ]
        assert on_disk == sorted(on_disk, reverse=True)
        assert on_disk[0]
        assert not on_disk[-1]


async def test_a_bit_that_flips_on_the_way_to_disk_is_found_also_by_who_has_read_the_row_before(tmp_path):
    async with queue_at(tmp_path) as queue:
        client, writer = queue.client("c"), queue.client("w")
        await writer.put("p", [f"s{i}" for i in range(16)], {"x": np.arange(16)})
        await writer.close()
        assert (await client.get("p", ["s3"]))["x"].values.tolist() == [3]
        await put(client, range(30))
        (block,) = (await client.lookup("p", ["s3"])).blocks
        path = tmp_path / "spill" / f"{block.segment:016x}.seg"
        data = bytearray(path.read_bytes())
        data[block.offset] ^= 1
        path.write_bytes(data)
        with pytest.raises(Corrupt):
            await client.get("p", ["s3"])


async def test_spilled_rows_that_are_cleared_free_their_disk(tmp_path):
    async with queue_at(tmp_path) as queue:
        client = queue.client("c")
        await put(client, range(40))
        await client.clear("p", [f"k{i}" for i in range(40)])
        for _ in range(20):
            await asyncio.sleep(0)
        assert units(queue).spilled == 0
        assert list((tmp_path / "spill").glob("*.seg")) == []


async def test_a_put_that_is_larger_than_what_is_free_waits_for_the_disk_only(tmp_path):
    async with queue_at(tmp_path) as queue:
        client = queue.client("c")
        await put(client, range(12))
        await asyncio.wait_for(client.put("p", ["large"], {"y": np.ones((1, BUDGET // 8))}), 5)
        assert (await client.get("p", ["large"], ["y"]))["y"].values.all()
        assert units(queue).used <= BUDGET
        await check(client, range(12))


async def test_a_view_of_a_row_that_goes_to_disk_stays_what_it_was(tmp_path):
    async with queue_at(tmp_path) as queue:
        client = queue.client("c")
        await put(client, range(1))
        view = await client.get("p", ["k0"], copy=False)
        await put(client, range(1, 30))
        again = await client.get("p", ["k0"], copy=False)
        for got in (view, again):
            assert (got["x"].values == 0).all()
            got["x"].values[:] = 7
        await check(client, range(30))


async def test_without_room_on_disk_either_a_put_fails_and_says_what_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr("transfer_queue.clients.async_client.SEGMENT_WAIT", 0.2)
    async with queue_at(tmp_path, 4 * SEGMENT) as queue:
        client = queue.client("c")
        with pytest.raises(QueueFull, match="of 262144 on disk.*spill_budget_bytes"):
            await put(client, range(40))
        await client.clear("p", [f"k{i}" for i in range(6)])
        await put(client, range(50, 52))
        await check(client, range(50, 52))


async def test_a_disk_that_is_full_is_named_and_costs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("transfer_queue.clients.async_client.SEGMENT_WAIT", 0.2)

    def full(*_):
        raise OSError(28, "No space left on device")

    async with queue_at(tmp_path) as queue:
        client = queue.client("c")
        monkeypatch.setattr("transfer_queue.storage.spill.os.sendfile", full)
        with pytest.raises(QueueFull, match=f"{tmp_path / 'spill'}: No space left on device"):
            await put(client, range(40))
        done = range(len((await client.list("p"))["p"]))
        await check(client, done)
        assert list((tmp_path / "spill").glob("*.part")) == []


async def test_rows_of_a_partition_that_is_to_stay_in_memory_are_never_spilled(tmp_path, monkeypatch):
    monkeypatch.setattr("transfer_queue.clients.async_client.SEGMENT_WAIT", 0.2)
    async with queue_at(tmp_path) as queue:
        client = queue.client("c")
        await client.open_partition("m", tasks=[], durability="memory")
        await put(client, range(3), "m")
        await put(client, range(30))
        assert queue._unit.files.disk is not None
        located = await client.lookup("m", ["k0", "k1", "k2"])
        assert not {block.segment for block in located.blocks} & queue._unit.files.disk.sizes.keys()
        with pytest.raises(QueueFull):
            await put(client, range(30), "m")
        await check(client, range(3), "m")


@pytest.mark.parametrize("moved", [False, True])
async def test_spilled_rows_are_there_after_a_restart(tmp_path, moved):
    options = {"directory": tmp_path / "run"}
    async with queue_at(tmp_path, **options) as queue:
        await put(queue.client("c"), range(40))
        await queue.client("d").open_partition("m", tasks=[], durability="memory")
    if moved:  # the same directory, but of nobody: ids begin anew
        (tmp_path / "spill" / "owner").write_text("another boot")
    async with queue_at(tmp_path, **options) as queue:
        client = queue.client("c")
        await queue._registered
        kept = len((await client.list("p"))["p"])
        assert kept == 40 if not moved else kept < 10
        if not moved:
            await check(client, range(40))
        assert queue.core.ledger.partition("m").rows.puts.durability == "memory"


def test_a_copy_that_was_cut_short_is_removed_and_a_finished_one_gives_way_to_the_original(tmp_path):
    files = UnitFiles(tmp_path / "unit", 0, budget=1 << 20, spill=tmp_path / "spill")
    a, b = (segment.segment for segment in files.make(2, SEGMENT))
    files.write(a, 0, b"hello")
    assert files.spill(a, 5)
    assert files.read(a, 0, 5) == b"hello"
    with pytest.raises(SegmentGone, match="sealed"):
        files.write(a, 0, b"x")
    (tmp_path / "spill" / f"{b:016x}.seg").write_bytes(b"a copy")
    (tmp_path / "spill" / f"{b:016x}.part").write_bytes(b"half a copy")
    files.close()
    again = UnitFiles(tmp_path / "unit", 0, budget=1 << 20, spill=tmp_path / "spill")
    assert (again.inventory(), again.spilled()) == ([(b, SEGMENT)], [(a, SEGMENT)])
    assert again.read(a, 0, 5) == b"hello"
    again.keep([b])
    assert again.spilled() == []
    again.close(remove=True)
    assert os.listdir(tmp_path) == []


def test_where_and_how_much_may_be_spilled_is_checked_before_anything_starts(tmp_path, monkeypatch):
    assert 0 < choose_spill(tmp_path / "not" / "yet", None, 2, 1 << 30, None) <= 4 << 30
    assert choose_spill(tmp_path, None, 2, 1 << 30, 0) == 0
    with pytest.raises(Invalid, match="lower spill_budget_bytes"):
        choose_spill(tmp_path, None, 2, 1 << 30, 1 << 60)
    with pytest.raises(Invalid, match="does not exist"):
        choose_spill(tmp_path, tmp_path / "missing", 2, 1 << 30, None)
    monkeypatch.setattr("transfer_queue.storage.place.kind_of", lambda _: "tmpfs")
    assert choose_spill(tmp_path, None, 2, 1 << 30, None) == 0
    monkeypatch.setattr("transfer_queue.storage.place.is_shared", lambda _: True)
    with pytest.raises(Invalid, match="local disk"):
        choose_spill(tmp_path, tmp_path, 2, 1 << 30, None)
