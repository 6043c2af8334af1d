"""Bulk frames between nodes: what a peer without the run's key gets (nothing), and what goes on by itself."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import zmq

from transfer_queue.errors import DeadlineExceeded, SegmentGone
from transfer_queue.net import bulk as b
from transfer_queue.net.bulk_session import Sessions, frame_mac, new_nonce, session_key
from transfer_queue.net.curve import connect_to
from transfer_queue.net.nuisance import QUIET, Nuisance
from transfer_queue.storage.unit_files import UnitFiles

KEY, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture(params=["ipc", "tcp", "curve"])
def endpoint(request, tmp_path) -> str:
    os.chmod(tmp_path, 0o700)
    return {"ipc": f"ipc://{tmp_path}/u", "tcp": "tcp://127.0.0.1:*", "curve": "curve://127.0.0.1:*"}[request.param]


@pytest.fixture
def files(tmp_path):
    files = UnitFiles(tmp_path / "unit", 0, budget=1 << 28)
    yield files
    files.close()


@pytest.fixture
async def server(files, endpoint):
    server = b.BulkServer(files, endpoint, KEY)
    yield server
    server.close()


@pytest.fixture
async def client(server):
    client = b.BulkClient(server.endpoint, KEY, name="reader")
    yield client
    client.close()


async def test_bytes_written_are_read_over_every_kind_of_endpoint(files, client):
    (segment,) = files.make(1, 40 << 20)
    data = np.random.default_rng(0).integers(0, 255, (20 << 20) + 7, dtype=np.uint8)
    await client.write(segment.segment, 64, data)
    assert np.array_equal(await client.read(segment.segment, 64, len(data)), data)
    many = await asyncio.gather(*(client.read(segment.segment, 64 + i, 10) for i in range(200)))
    assert all(np.array_equal(found, data[i : i + 10]) for i, found in enumerate(many))
    with pytest.raises(SegmentGone):
        await client.read(12345, 0, 1)


async def test_a_client_goes_on_when_the_unit_begins_a_new_life(files, server, client):
    (segment,) = files.make(1, 1 << 20)
    await client.write(segment.segment, 0, np.arange(100, dtype=np.uint8))
    server.close()
    again = b.BulkServer(files, server.endpoint, KEY)
    found = await asyncio.wait_for(client.read(segment.segment, 0, 100), 10)
    assert found.tolist() == list(range(100))
    again.close()


@pytest.mark.parametrize("scheme", ["tcp", "curve"])
async def test_a_restarted_unit_listens_where_it_did_before_unless_that_is_taken(files, scheme):
    first = b.BulkServer(files, f"{scheme}://127.0.0.1:*", KEY)
    first.close()
    again = b.BulkServer(files, f"{scheme}://127.0.0.1:*", KEY)
    assert again.endpoint == first.endpoint
    moved = b.BulkServer(files, f"{scheme}://127.0.0.1:*", KEY)
    assert moved.endpoint != first.endpoint
    again.close()
    moved.close()


async def test_a_client_with_another_key_gets_nothing_and_says_what_to_look_at(files, server):
    (segment,) = files.make(1, 1 << 20)
    thief = b.BulkClient(server.endpoint, OTHER, name="thief", timeout=0.5)
    with pytest.raises(DeadlineExceeded, match="has this process the key of its run"):
        await thief.read(segment.segment, 0, 100)
    thief.close()


class Wire:
    """A peer that speaks the protocol by hand: let in by the password (overheard, say), without or with the key."""

    def __init__(self, server: b.BulkServer) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        connect_to(self.socket, server.endpoint, b.credentials(KEY))
        self.session = new_nonce()

    async def open(self) -> bytes:
        """The unit's nonce."""
        self.socket.send(b._encoder.encode(b.BulkOpen(self.session)))
        opened = b._answer_decoder.decode((await self.answer())[0])
        assert isinstance(opened, b.BulkOpened)
        return opened.unit

    async def answer(self, within: float = 5.0) -> list[bytes]:
        """The next message, or [] if there is none."""
        arrived = await asyncio.to_thread(self.socket.poll, int(within * 1000))
        return self.socket.recv_multipart() if arrived else []

    def read(self, unit: bytes, segment: int, *, number: int = 1, key: str = KEY) -> list[bytes]:
        header = b._encoder.encode(b.BulkRead(number, self.session, unit, segment, 0, 100))
        secret = session_key(b.credentials(key).bulk, self.session, unit)
        return [header, b"", frame_mac(secret, 0, number, header, b"")]


@pytest.fixture
async def plain(files, tmp_path):
    """A server whose frames a stranger can see and send: authenticated, not encrypted."""
    server = b.BulkServer(files, "tcp://127.0.0.1:*", KEY)
    yield server
    server.close()


async def test_a_frame_is_answered_once_and_a_replayed_or_altered_one_never(files, plain):
    (segment,) = files.make(1, 1 << 20)
    wire = Wire(plain)
    unit = await wire.open()
    frames = wire.read(unit, segment.segment)
    wire.socket.send_multipart(frames)
    assert len((await wire.answer())[1]) == 100
    altered = [frames[0], b"x", frames[2]]
    for forged in (frames, altered, wire.read(unit, segment.segment, number=2, key=OTHER), frames[:1], [b"\xc1"]):
        wire.socket.send_multipart(forged)
    assert await wire.answer(0.2) == []
    assert plain.refused == 5
    stranger = Wire(plain)
    stranger.socket.send_multipart(frames)  # recorded from the other connection
    assert await stranger.answer(0.2) == []
    for peer in (wire, stranger):
        peer.socket.close()


async def test_a_frame_of_an_earlier_life_of_the_unit_only_gets_its_new_nonce(files, plain):
    (segment,) = files.make(1, 1 << 20)
    wire = Wire(plain)
    frames = wire.read(b"\0" * 16, segment.segment)
    wire.socket.send_multipart(frames)
    (answer,) = await wire.answer()
    assert isinstance(b._answer_decoder.decode(answer), b.BulkOpened)
    wire.socket.close()


def test_a_refused_frame_costs_less_than_a_millisecond():
    sessions = Sessions(b"k" * 32)
    mine, header = new_nonce(), b"h" * 64
    began = time.process_time()
    for number in range(1, 201):
        assert sessions.accept(mine, number, header, b"", b"\0" * 32) is None
    assert (time.process_time() - began) / 200 < 0.001
    assert not sessions._known


@pytest.mark.parametrize("scheme", ["tcp", "curve"])
async def test_a_scan_and_a_tls_hello_harm_nothing_and_are_told_once(files, scheme, caplog):
    server = b.BulkServer(files, f"{scheme}://127.0.0.1:*", KEY)
    client = b.BulkClient(server.endpoint, KEY, name="reader")
    (segment,) = files.make(1, 1 << 20)
    host, _, port = server.endpoint.partition("://")[2].rpartition(":")
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            for hello in (b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), b"GET / HTTP/1.1\r\n\r\n"):
                with socket.create_connection((host, int(port)), 5) as stray:
                    stray.sendall(hello)
        await client.write(segment.segment, 0, np.arange(9, dtype=np.uint8))
        await asyncio.sleep(0.3)
    assert (await client.read(segment.segment, 0, 9)).tolist() == list(range(9))
    assert len([record for record in caplog.records if "turned away" in record.message]) <= 1
    client.close()
    server.close()


def test_a_nuisance_is_told_once_a_minute_with_its_count(caplog):
    now = [0.0]
    nuisance = Nuisance(logging.getLogger("x"), "a stray frame was ignored", clock=lambda: now[0])
    for _ in range(1000):
        nuisance.note("why")
    now[0] = QUIET
    nuisance.note("again")
    assert [record.message for record in caplog.records] == [
        "a stray frame was ignored (1 so far): why",
        "a stray frame was ignored (1001 so far): again",
    ]


async def test_no_more_than_a_window_is_on_its_way_and_a_cancelled_wait_gives_its_place_back():
    window = b.ByteWindow(4 * b.LEAST)
    for _ in range(4):
        await window.take(1)
    first, second = (asyncio.create_task(window.take(b.LEAST)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    window.give(1)
    await asyncio.wait_for(second, 1)
    window.give(1)
    await asyncio.wait_for(window.take(1), 1)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""Of ZMTP 3.0 (RFC 23); what follows: the mechanism in 20 bytes, as-server, 31 bytes of nothing."""


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN"])
async def test_a_message_without_end_from_somebody_without_the_password_is_cut_off_in_the_handshake(plain, mechanism):
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def send_without_end() -> int:
        """Bytes taken before the connection was closed; 256 MiB if it was not."""
        host, _, port = plain.endpoint.removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port)), 5) as peer:
            peer.settimeout(10)
            peer.sendall(GREETING + mechanism.ljust(20, b"\0") + bytes(32))
            hello = {
                b"NULL": b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER",
                b"PLAIN": b"\x05HELLO\x0etransfer_queue\x05wrong",
            }[mechanism]
            peer.sendall(bytes([4, len(hello)]) + hello)
            part = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)  # long, and more follow
            for taken in range(256):
                try:
                    peer.sendall(part)
                except OSError:
                    return taken << 20
            return 256 << 20

    before = resident()
    assert await asyncio.wait_for(asyncio.to_thread(send_without_end), 30) < 64 << 20
    assert resident() - before < 64 << 20
