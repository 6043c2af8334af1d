"""What a confused or hostile peer, or a damaged file, can do to the queue: nothing but get an error that teaches."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import zmq

from transfer_queue.controller import serve_controller
from transfer_queue.errors import Invalid
from transfer_queue.net.codec import decode_response, encode
from transfer_queue.net.messages import VERSION, Hello, Request, Welcome
from transfer_queue.net.transport import ZmqTransport, host_id, read_key
from transfer_queue.service import QueueService


async def run_controller(directory: Path, stop: asyncio.Event, ready: asyncio.Event) -> None:
    os.chmod(directory, 0o700)
    await serve_controller(
        directory, f"ipc://{directory}/c", run="r", key_file=str(directory / "key"), stop=stop,
        segment_bytes=1 << 20, ready=ready.set,
    )  # fmt: skip


async def test_a_process_id_that_cannot_be_one_does_not_end_the_controller(tmp_path):
    (tmp_path / "key").write_text("ab" * 32)
    stop, ready = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(run_controller(tmp_path, stop, ready))
    await asyncio.wait_for(ready.wait(), 10)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.connect(f"ipc://{tmp_path}/c")
    for pid in (-1, 2**31, 2**31 - 1, 2**63 - 1, -(2**63), 0):
        socket.send(encode(Request(1, Hello(VERSION, "r", "ab" * 32, "x", pid, host_id()))))
        answer = decode_response(await asyncio.to_thread(socket.recv))
        assert isinstance(answer.body, Welcome), pid
    socket.close(linger=0)
    assert not serving.done()
    stop.set()
    await asyncio.wait_for(serving, 10)


@pytest.mark.parametrize("content", ["", "\n", "ab" * 15])
async def test_a_key_file_without_a_key_is_refused_by_everybody(tmp_path, content):
    (tmp_path / "key").write_text(content)
    with pytest.raises(Invalid, match="key file .* at least 32"):
        read_key(str(tmp_path / "key"))
    with pytest.raises(Invalid, match="key file"):
        await run_controller(tmp_path, asyncio.Event(), asyncio.Event())
    with pytest.raises(Invalid, match="key file"):
        QueueService(tmp_path, storage_dir=tmp_path, units=1, unit_budget_bytes=1 << 20)
    address = {"run": "r", "socket": f"ipc://{tmp_path}/c", "key_file": str(tmp_path / "key")}
    with pytest.raises(Invalid, match="key file"):
        await ZmqTransport.connect(address, name="x", timeout=1)


def test_a_key_that_is_too_short_is_not_taken(tmp_path):
    with pytest.raises(Invalid, match="give at least 16"):
        QueueService(tmp_path, storage_dir=tmp_path, key=b"")
