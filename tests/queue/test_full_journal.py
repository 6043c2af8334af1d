"""A disk without room for the journal: who wanted the change is told so, and nothing half is left behind."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from transfer_queue.clients.async_client import QueueClient
from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.process import ControllerServer
from transfer_queue.errors import QueueError
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
