"""Durability "journal": what was acknowledged is on the disk, and survives a machine that dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.queue.chaos.disk import Disk
from transfer_queue.client import QueueClient
from transfer_queue.clients.sync_client import SyncQueueClient
from transfer_queue.controller.compaction import QUIET
from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.process import serve_controller
from transfer_queue.errors import Invalid, QueueFull, SegmentGone
from transfer_queue.ledger import Ledger
from transfer_queue.local import LocalQueue
from transfer_queue.net import messages as m
from transfer_queue.net.codec import decode_response
from transfer_queue.net.stream_listener import StreamListener
from transfer_queue.service.queue_service import QueueService
from transfer_queue.storage.journal import FORMAT, Journal, MemoryJournal, read_journals
from transfer_queue.storage.segments import is_durable
from transfer_queue.storage.unit import serve_unit
from transfer_queue.storage.unit_files import UnitFiles, replace_file

SEGMENT = 64 << 10
KEY = "ab" * 32


class Machine:
    """A queue with its journal and one directory on the disk, and memory that is lost with the power."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self._boots = monkeypatch, 0
        self.memory = path / "memory"
        self.spill = path / "disk" / "unit-0"
        (path / "disk").mkdir()
        self.disk = Disk(path / "disk", monkeypatch)
        self.boot()

    def boot(self) -> None:
        self._boots += 1
        shutil.rmtree(self.memory, ignore_errors=True)
        self.memory.mkdir()
        self._monkeypatch.setattr("transfer_queue.storage.unit_files.boot_id", lambda: f"boot {self._boots}")
        self._monkeypatch.setattr("transfer_queue.clients.access.boot_id", lambda: f"boot {self._boots}")

    def reboot(self) -> None:
        self.disk.lose_power()
        self.boot()

    def queue(self, **options: Any) -> LocalQueue:
        budgets: dict[str, Any] = {"unit_budget_bytes": 16 * SEGMENT, "spill_budget_bytes": 64 * SEGMENT}
        return LocalQueue(
            directory=self.disk.root / "run", storage_dir=self.memory, spill_dir=self.spill, segment_bytes=SEGMENT,
            **budgets | options,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


async def put(client: QueueClient, partition: str, rows: range, *, size: int = 100) -> None:
    for i in rows:
        await client.put(partition, [f"k{i}"], {"x": np.full((1, size), i)}, tags=[{"n": i}])


async def check(client: QueueClient, partition: str, rows: range) -> None:
    got = await client.get(partition, [f"k{i}" for i in rows])
    assert got["x"].values[:, 0].tolist() == got["x"].values[:, -1].tolist() == list(rows)
    assert [(await client.list(partition))[partition][f"k{i}"] for i in rows] == [{"n": i} for i in rows]


async def test_what_was_acknowledged_survives_a_machine_that_dies(machine):
    async with machine.queue() as queue:
        client = queue.client("c")
        await client.open_partition("j", tasks=[], durability="journal")
        await put(client, "m", range(3))
        await put(client, "j", range(20))
        await client.put("j", ["large"], {"x": np.full((1, SEGMENT), 7)}, tags=[{"n": 7}])
        await client.put("j", ["k3"], {}, tags=[{"n": -3}])
        await client.clear("j", ["k4"])
    machine.reboot()
    async with machine.queue() as queue:
        client = queue.client("c")
        await queue._registered
        assert sorted((await client.list("j"))["j"]) == sorted(["large", *(f"k{i}" for i in range(20) if i != 4)])
        assert (await client.list("j"))["j"]["k3"] == {"n": -3}
        await check(client, "j", range(5, 20))
        assert (await client.get("j", ["large"]))["x"].values.tolist() == [[7] * SEGMENT]
        assert (await client.list("m")).get("m", {}) == {}
        assert len({b.segment for b in (await client.lookup("j", ["k5"])).blocks}) == 1
        await put(client, "j", range(20, 40))
    machine.reboot()
    async with machine.queue() as queue:
        await queue._registered
        await check(queue.client("c"), "j", range(5, 40))


def test_a_service_whose_memory_is_gone_still_has_the_durable_rows(tmp_path):
    options: dict[str, Any] = {"units": 2, "unit_budget_bytes": 16 << 20, "spill_budget_bytes": 64 << 20}
    (tmp_path / "memory").mkdir()
    options |= {"spill_dir": tmp_path, "storage_dir": tmp_path / "memory"}
    for boot in range(2):
        service = QueueService(tmp_path / "run", **options)
        client = SyncQueueClient(service.start(), "c")
        try:
            if boot:
                assert client.get("j", ["a", "b"])["x"].values.tolist() == [1, 2]
                assert client.list("m").get("m", {}) == {}
                continue
            client.open_partition("j", tasks=[], durability="journal")
            for partition in ("j", "m"):
                client.put(partition, ["a", "b"], {"x": np.array([1, 2])})
        finally:
            client.close()
            service.stop(clean=bool(boot))
        shutil.rmtree(tmp_path / "memory")
        (tmp_path / "memory").mkdir()


async def test_groups_admitted_closed_and_acked_survive_a_machine_that_dies(machine):
    tasks = [m.TaskSpec("generate", "prompt"), m.TaskSpec("train", "rows", bind="incarnation")]
    async with machine.queue() as queue:
        client = queue.client("c")
        await client.open_partition("j", tasks=tasks, durability="journal")
        await client.admit("j", [m.GroupSpec(f"g{i}", 1, i) for i in range(4)], {"prompt": np.arange(4)})
        leased = await client.lease("j", "generate", groups=3)
        for i in range(3):
            close = m.SessionClose(f"g{i}", 0, [f"g{i}_0_0"])
            await client.put("j", [f"g{i}_0_0"], {"x": np.arange(1) + i}, token=leased.token, closes=[close])
        trained = await client.lease("j", "train", groups=1)
        await client.ack("j", trained.token, ["g0"], step=1)
        await client.commit_step("j", 1)
    machine.reboot()
    async with machine.queue() as queue:
        await queue._registered
        client = queue.client("c")
        depth = (await client.stats()).partitions["j"].depth
        assert {state: n for state, n in depth.items() if n} == {"trained": 1, "ready": 2, "pending": 1}
        assert (await client.get("j", ["g1_0_0", "g2_0_0"]))["x"].values.tolist() == [1, 2]
        assert (await client.get("j", ["g3"]))["prompt"].values.tolist() == [3]


async def test_rows_of_other_partitions_are_lost_with_the_machine_and_it_is_told(machine):
    tasks = [m.TaskSpec("generate", "prompt")]
    async with machine.queue() as queue:
        client = queue.client("c")
        for name, durability in (("s", "spill"), ("j", "journal")):
            await client.open_partition(name, tasks=tasks, durability=durability)
            await client.admit(name, [m.GroupSpec("g", 1, 0)], {"prompt": np.arange(1)})
    machine.reboot()
    async with machine.queue() as queue:
        await queue._registered
        client = queue.client("c")
        assert (await client.watch("s", -1)).groups[0].reason == "prompt lost"
        assert (await client.watch("j", -1)).groups[0].reason == ""


async def test_survivors_that_were_moved_survive_a_machine_that_dies(machine):
    async with machine.queue() as queue:
        client = queue.client("c")
        await client.open_partition("j", tasks=[], durability="journal")
        await put(client, "j", range(32), size=SEGMENT // 64)
        before = {b.segment for b in (await client.lookup("j", ["k31"])).blocks}
        await put(client, "j", range(32, 40), size=SEGMENT // 64)
        await client.clear("j", [f"k{i}" for i in range(31)])
        await asyncio.sleep(QUIET + 0.5)
        (after,) = (await client.lookup("j", ["k31"])).blocks
        assert after.segment not in before
        assert is_durable(after.segment)
    machine.reboot()
    async with machine.queue() as queue:
        await queue._registered
        await check(queue.client("c"), "j", range(31, 40))


async def test_rows_put_before_a_partition_became_durable_stay_readable_and_the_next_are_copied_anew(machine):
    async with machine.queue() as queue:
        client, other = queue.client("c"), queue.client("o")
        await put(client, "j", range(3))
        await other.open_partition("j", tasks=[], durability="journal")
        await put(client, "j", range(3, 6))
        await check(other, "j", range(6))
        blocks = (await client.lookup("j", ["k2", "k3"])).blocks
        assert [is_durable(block.segment) for block in blocks] == [False, True]


async def test_segments_on_disk_count_toward_its_budget_and_go_when_they_are_empty(machine, monkeypatch):
    monkeypatch.setattr("transfer_queue.clients.async_client.SEGMENT_WAIT", 0.2)
    async with machine.queue(spill_budget_bytes=4 * SEGMENT) as queue:
        client = queue.client("c")
        await client.open_partition("j", tasks=[], durability="journal")
        with pytest.raises(QueueFull, match="of 262144 on disk"):
            await put(client, "j", range(10), size=SEGMENT // 8)
        with pytest.raises(Invalid, match="budget on disk"):
            await put(client, "j", range(1), size=SEGMENT)
        assert len(list(machine.spill.glob("*.seg"))) == 4
        await client.clear("j", [f"k{i}" for i in range(4)])
        await put(client, "j", range(10, 14), size=SEGMENT // 8)
        await check(client, "j", range(10, 14))
        assert queue.core._grants.stats()[0].spilled == 4 * SEGMENT


async def test_a_disk_that_fails_is_named_and_what_it_did_not_take_is_copied_elsewhere(machine, monkeypatch):
    async with machine.queue() as queue:
        client = queue.client("c")
        await client.open_partition("j", tasks=[], durability="journal")
        await put(client, "j", range(2))
        working, failures = os.fdatasync, iter([True])

        def failing(fd: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(".seg") and next(failures, False):
                raise OSError(5, "Input/output error")
            working(fd)

        monkeypatch.setattr(os, "fdatasync", failing)
        await put(client, "j", range(2, 4))
        await check(client, "j", range(4))
        segments = [(await client.lookup("j", [key])).blocks[0].segment for key in ("k1", "k2")]
        assert segments[0] != segments[1]


async def test_a_disk_that_is_full_is_named_and_costs_nothing(machine, monkeypatch):
    monkeypatch.setattr("transfer_queue.clients.async_client.SEGMENT_WAIT", 0.2)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    async with machine.queue() as queue:
        client = queue.client("c")
        await client.open_partition("j", tasks=[], durability="journal")
        with monkeypatch.context() as patch:
            patch.setattr("transfer_queue.storage.spill.make_file", full)
            with pytest.raises(QueueFull, match=f"{machine.spill}: No space left on device"):
                await put(client, "j", range(1))
        assert (await client.list("j")).get("j", {}) == {}
        await put(client, "m", range(1))
        monkeypatch.setattr("transfer_queue.clients.async_client.SEGMENT_WAIT", 10.0)
        await put(client, "j", range(1))
        await check(client, "j", range(1))


@pytest.mark.parametrize("journal", [False, True])
async def test_a_queue_without_a_disk_refuses_and_says_what_to_do(tmp_path, journal):
    options = {"directory": tmp_path / "run"} if journal else {"spill_dir": tmp_path, "spill_budget_bytes": 1 << 20}
    async with LocalQueue(storage_dir=tmp_path, **options) as queue:
        await queue._registered
        why = "no directory on disk" if journal else "keeps no journal"
        with pytest.raises(Invalid, match=f"'j' cannot have durability='journal'.*{why}.*spill_dir"):
            await queue.client("c").open_partition("j", tasks=[], durability="journal")
        assert not queue.core.ledger.is_durable("j")


def test_ids_are_new_after_a_reboot_and_durable_segments_wait_for_the_controllers_word(tmp_path):
    def unit() -> UnitFiles:
        return UnitFiles(tmp_path / "memory", 0, budget=16 * SEGMENT, spill=tmp_path / "disk")

    files = unit()
    mine, others = (files.make_on_disk(SEGMENT, durable=True).segment for _ in range(2))
    plain = files.make_on_disk(SEGMENT, durable=False).segment
    files.write(mine, 64, b"hello")
    with pytest.raises(SegmentGone, match="sealed"):
        files.write(plain, 0, b"x")
    files.close()
    shutil.rmtree(tmp_path / "memory")
    again = unit()
    assert again.incarnation == files.incarnation + 1
    assert (again.inventory(), again.spilled()) == ([], [(mine, SEGMENT), (others, SEGMENT)])
    again.keep([mine])
    assert again.spilled() == [(mine, SEGMENT)]
    assert again.read(mine, 64, 5) == b"hello"
    again.close(remove=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("syncs", [{2, 5}, {5}])
def test_a_sync_covers_the_files_that_a_snapshot_has_put_aside(tmp_path, monkeypatch, syncs):
    """Of three files with two records each; without the last two, synced by nothing."""
    (tmp_path / "run").mkdir()
    disk = Disk(tmp_path, monkeypatch)
    journal = Journal(tmp_path / "run" / "journal")
    for number in range(1, 8):
        if number % 2 and number > 1:
            journal.rotate(number)
        mutation = m.Life(FORMAT, "r", 1) if number == 1 else m.Expire()
        journal.append(m.Record(number, 0.0, "", 0, mutation))
        if number in syncs:
            journal.sync()
    journal.close()
    disk.lose_power()
    found = [record.seq for record in read_journals(tmp_path / "run" / "journal")]
    assert found[:5] == [1, 2, 3, 4, 5]


def test_an_answer_leaves_only_after_its_record_is_on_the_disk_and_64_need_one_sync():
    journal = MemoryJournal()
    answers: list[m.Response] = []
    core = ControllerCore(Ledger(), send=lambda _, response: answers.append(response), journal=journal)
    core.handle("c", m.Request(1, m.Hello(m.VERSION, "r", "", "c")), 0.0)

    core.handle("c", m.Request(99, m.OpenPartition("m", durability="memory")), 0.0)
    core.sync()
    assert journal.synced == 0
    core.handle("c", m.Request(100, m.OpenPartition("j", durability="journal")), 0.0)
    core.sync()
    assert journal.synced == 2
    for i in range(64):
        core.handle("c", m.Request(200 + i, m.Commit("j", [f"k{i}"], tags=[{"n": i}])), 0.0)
    assert journal.synced == 2
    core.sync()
    assert journal.synced == 66
    core.handle("c", m.Request(300, m.Commit("m", ["k"], tags=[{}])), 0.0)
    core.sync()
    assert journal.synced == 66
    core.handle("c", m.Request(301, m.ClearPartition("j")), 0.0)
    core.sync()
    assert journal.synced == 68


@contextlib.asynccontextmanager
async def served(path: Path) -> AsyncIterator[dict[str, str]]:
    """A controller and a unit behind their sockets, in this process; the address."""
    replace_file(path / "key", KEY)
    os.chmod(path, 0o700)
    address = {"run": "r", "socket": f"unix://{path}/c", "key_file": str(path / "key")}
    stop, ready, registered = asyncio.Event(), asyncio.Event(), asyncio.Event()
    controller = asyncio.create_task(
        serve_controller(
            path, address["socket"], run="r", key_file=address["key_file"], stop=stop, segment_bytes=SEGMENT,
            ready=ready.set,
        )
    )  # fmt: skip
    await asyncio.wait_for(ready.wait(), 10)
    unit = asyncio.create_task(
        serve_unit(
            address, unit=0, directory=path / "memory", endpoint=f"ipc://{path}/u", budget=16 * SEGMENT,
            segment_bytes=SEGMENT, spill=path / "disk", spill_budget=64 * SEGMENT, stop=stop, ready=registered.set,
        )
    )  # fmt: skip
    await asyncio.wait_for(registered.wait(), 10)
    try:
        yield address
    finally:
        stop.set()
        await asyncio.wait_for(asyncio.gather(unit, controller), 10)


@pytest.mark.parametrize("remote", [False, True])
async def test_bytes_then_record_are_synced_before_the_answer_and_64_puts_at_once_share_it(
    tmp_path, monkeypatch, remote
):
    disk = Disk(tmp_path, monkeypatch)
    send = StreamListener.send

    def note(listener: StreamListener, client: str, frame: bytes) -> bool:
        if isinstance(decode_response(frame).body, m.Committed):
            disk.syncs.append("answer")
        return send(listener, client, frame)

    monkeypatch.setattr(StreamListener, "send", note)
    async with served(tmp_path) as address:
        client = await QueueClient.connect(address, name="c", force_remote=remote)
        await client.open_partition("j", tasks=[], durability="journal")
        await put(client, "j", range(1))
        disk.syncs.clear()
        await put(client, "j", range(1, 3))
        kinds = ["bytes" if name.endswith(".seg") else name for name in disk.syncs]
        assert kinds == ["bytes", "journal", "answer"] * 2
        disk.syncs.clear()
        await asyncio.gather(*(put(client, "j", range(i, i + 1)) for i in range(3, 67)))
        assert disk.syncs.count("answer") == 64
        assert disk.syncs.count("journal") <= 8
        if not remote:
            assert sum(name.endswith(".seg") for name in disk.syncs) <= 8
        disk.syncs.clear()
        await put(client, "m", range(8))
        assert disk.syncs == ["answer"] * 8
        await check(client, "j", range(67))
        await client.close()
