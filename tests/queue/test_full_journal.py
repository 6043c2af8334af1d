"""A disk without room for the journal: who wanted the change is told so, and nothing half is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest

from tests.queue.test_full import fill
from transfer_queue.clients.async_client import QueueClient
from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.process import ControllerServer
from transfer_queue.errors import DeadlineExceeded, QueueError
from transfer_queue.net.messages import GroupSpec, TaskSpec
from transfer_queue.service.queue_service import QueueService
from transfer_queue.storage import journal as j

KEY = "ab" * 32


@pytest.fixture
def full(monkeypatch):
    """Fills the disk: a write takes three bytes, the next one none."""
    write, calls = os.write, iter([3])

    def short(fd: int, data: bytes) -> int:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith("/journal"):
            return write(fd, data)
        count = next(calls, 0)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:count])

    return lambda: monkeypatch.setattr(j.os, "write", short)


async def test_whose_change_finds_no_room_in_the_journal_is_told_the_file_and_the_reason(tmp_path: Path, full):
    os.chmod(tmp_path, 0o700)
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context.get("exception")))

    def make_core(send) -> ControllerCore:
        return ControllerCore.recover(tmp_path / "journal", send=send, now=0.0, run="r", key=KEY)

    server = ControllerServer([f"unix://{tmp_path}/c"], KEY, make_core)
    address = {"run": "r", "socket": f"unix://{tmp_path}/c", "key_file": str(tmp_path / "key")}
    client = await QueueClient.connect(address, name="c", timeout=10.0)
    await client.put("p", ["a"], {}, tags=[{"x": 1}])
    before = (tmp_path / "journal").read_bytes()
    full()
    with pytest.raises(QueueError, match="nothing was done.*No space left on device.*journal'"):
        await client.put("p", ["b"], {}, tags=[{"x": 2}])
    assert (tmp_path / "journal").read_bytes() == before
    assert [type(error) for error in errors] == [j.JournalFailed]  # which ends the process
    server.close()
    await client.close()


async def test_all_hear_of_a_full_disk_under_the_journal_and_are_served_once_it_has_room(small, tmp_path, monkeypatch):
    service = QueueService(
        small / "queue", storage_dir=tmp_path, units=1, unit_budget_bytes=4 << 20, segment_bytes=1 << 20,
        spill_budget_bytes=0, bind="127.0.0.1",
    )  # fmt: skip
    await service.astart()
    elsewhere = {"run": service.address["run"], "key_file": service.address["key_file"]}
    elsewhere["socket"] = service.address["network"]
    client = await QueueClient.connect(service.address, name="near")
    remote = await QueueClient.connect(elsewhere, name="far")
    await client.open_partition("p", tasks=[TaskSpec("generate", "prompt")])
    leasing = asyncio.create_task(remote.lease("p", "generate", groups=1, wait=60.0))
    await asyncio.sleep(0.1)
    other = fill(small)
    acknowledged = await puts_until_refused(client)
    monkeypatch.setattr("transfer_queue.clients.async_client.GRACE", 1.5)
    await until_nothing_is_served(client)
    began = time.monotonic()
    await asyncio.gather(*(hears_of_the_disk(work, small) for work in (
        client.put("q", ["late"], {}), client.list(), remote.list(),
        QueueClient.connect(service.address, name="new", timeout=1.5),
        QueueClient.connect(elsewhere, name="new and far", timeout=1.5),
    )))  # fmt: skip
    assert time.monotonic() - began < 3.0
    assert service.restarts() == {"controller": 0, "unit-0": 0}
    monkeypatch.undo()
    other.unlink()
    async with asyncio.timeout(5):
        await client.admit("p", [GroupSpec("u0", 1, 0)], {"raw_prompt": ["?"]})
        assert (await leasing).groups[0].uid == "u0"
    assert set((await remote.list("q"))["q"]) >= set(acknowledged)
    assert service.restarts()["controller"] == 1
    await client.close()
    await remote.close()
    await service.astop(clean=True)


async def puts_until_refused(client: QueueClient) -> list[str]:
    acknowledged = []

    async def puts() -> None:
        for i in range(10_000):
            await client.put("q", [f"k{i}"], {}, tags=[{"x": "y" * 1000}])
            acknowledged.append(f"k{i}")

    with pytest.raises(QueueError, match="nothing was done.*No space left on device"):
        await puts()
    return acknowledged


async def until_nothing_is_served(client: QueueClient) -> None:
    """The controller that has refused a put answers what it has already read, then ends."""
    with contextlib.suppress(DeadlineExceeded):
        async with asyncio.timeout(10):
            while True:
                await client.list()


async def hears_of_the_disk(work: Awaitable[object], disk: Path) -> None:
    with pytest.raises(DeadlineExceeded) as error:
        await work
    for part in (f"{disk}/queue/journal: No space left on device", f"the disk at {disk} has 0 MiB", "Make room there"):
        assert part in str(error.value)


async def test_a_put_that_would_not_wait_long_does_not_wait_for_room_in_the_journal(small, tmp_path, monkeypatch):
    monkeypatch.setattr("transfer_queue.clients.async_client.REFUSED_GRACE", 0.5)
    service = QueueService(
        small / "queue", storage_dir=tmp_path, units=1, unit_budget_bytes=4 << 20, segment_bytes=1 << 20,
        spill_budget_bytes=0,
    )  # fmt: skip
    await service.astart()
    client = await QueueClient.connect(service.address, name="near")
    fill(small)
    await puts_until_refused(client)
    with monkeypatch.context() as patch:
        patch.setattr("transfer_queue.clients.async_client.GRACE", 1.5)
        await until_nothing_is_served(client)
    began = time.monotonic()
    await hears_of_the_disk(client.put("q", ["late"], {}, tags=[{}], wait=0.5), small)
    assert time.monotonic() - began < 10.0
    await client.close()
    await service.astop(clean=True)
