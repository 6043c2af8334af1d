"""SocketTransport, over each kind of connection, against a controller that misbehaves as only a fake one does."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct

import pytest
import zmq

from transfer_queue.errors import DeadlineExceeded, Disconnected, Invalid
from transfer_queue.net.codec import MAX_FRAME, SAY_HELLO, Malformed, decode_request, encode, failed_of
from transfer_queue.net.links import ZmqListener
from transfer_queue.net.messages import (
    Bye,
    Clear,
    Commit,
    Failed,
    Hello,
    Lease,
    Leased,
    Listing,
    ListKeys,
    Ok,
    Request,
    Response,
    Stats,
    Token,
    Welcome,
)
from transfer_queue.net.sockets import bind_private, check_endpoint
from transfer_queue.net.stream_listener import STRANGER_LIMIT, StreamListener
from transfer_queue.net.transport import SocketTransport
from transfer_queue.storage.unit_files import replace_file

LISTENERS = {"unix": lambda path, **told: StreamListener(path, **told),
             "ipc": lambda path, **told: ZmqListener(f"ipc://{path}", **told)}  # fmt: skip


class FakeController:
    """Welcomes everybody with its epoch; notes all other requests and leaves the answering to the test."""

    def __init__(self, directory, scheme: str, *, epoch: int = 1) -> None:
        os.chmod(directory, 0o700)
        replace_file(directory / "key", "ab" * 32)
        self.address = {"run": "r", "socket": f"{scheme}://{directory}/c", "key_file": str(directory / "key")}
        self.scheme = scheme
        self.epoch = epoch
        self.requests: asyncio.Queue = asyncio.Queue()
        self.refused: list[str] = []
        self.ended: list[str] = []
        self.pids: set[int] = set()
        self.listener = LISTENERS[scheme](
            f"{directory}/c", on_frame=self._on_frame, on_turn=lambda: None, on_end=self.ended.append,
            refuse=self.refused.append,
        )  # fmt: skip

    def _on_frame(self, client: str, frame: bytes | memoryview, pid: int) -> None:
        request = decode_request(frame)
        self.pids.add(pid)
        if isinstance(request.body, Hello):
            self.answer(client, request.id, Welcome(self.epoch, []))
            self.listener.trust(client)
        elif isinstance(request.body, Bye):
            self.answer(client, request.id, Ok())
        else:
            self.requests.put_nowait((client, request))

    def answer(self, client: str, request: int, body) -> None:
        self.send(client, encode(Response(request, body)))

    def send(self, client: str, frame: bytes) -> None:
        assert self.listener.send(client, frame)
        self.listener.flush()

    def die(self) -> None:
        self.listener.close()


@pytest.fixture(params=["unix", "ipc"])
async def fake(tmp_path, request):
    fake = FakeController(tmp_path, request.param)
    yield fake
    fake.die()


@pytest.fixture
async def transport(fake):
    transport = await SocketTransport.connect(fake.address, name="rank-0", timeout=5)
    yield transport
    await transport.close()


async def test_requests_are_pipelined_and_answered_in_any_order(fake, transport):
    first = asyncio.create_task(transport.request(Stats()))
    second = asyncio.create_task(transport.request(ListKeys()))
    (identity, a), (_, b) = await fake.requests.get(), await fake.requests.get()
    fake.answer(identity, b.id, Listing({"p": {}}))
    fake.answer(identity, a.id, Ok())
    assert (await first, await second) == (Ok(), Listing({"p": {}}))


async def test_an_unanswered_request_goes_to_the_next_controller_with_its_id_and_the_rest_of_its_wait(
    fake, transport, tmp_path
):
    waiting = asyncio.create_task(transport.request(Lease("p", "generate", "w", groups=1, wait=60.0), timeout=70))
    _, before = await fake.requests.get()
    fake.die()
    await asyncio.sleep(0.1)
    again = FakeController(tmp_path, fake.scheme, epoch=2)
    identity, after = await asyncio.wait_for(again.requests.get(), 5)
    assert after.id == before.id
    assert 50 < after.body.wait < 60
    again.answer(identity, after.id, Leased(Token(2, 1), []))
    assert (await waiting).token == Token(2, 1)
    await transport.close()
    again.die()


async def test_a_controller_that_does_not_know_us_is_greeted_and_asked_again(fake, transport):
    waiting = asyncio.create_task(transport.request(Stats()))
    identity, first = await fake.requests.get()
    fake.answer(identity, first.id, Failed("disconnected", SAY_HELLO))
    identity, second = await asyncio.wait_for(fake.requests.get(), 5)
    assert second.id == first.id
    fake.answer(identity, second.id, Ok())
    assert await waiting == Ok()


async def test_other_failures_are_raised_as_their_class(fake, transport):
    waiting = asyncio.create_task(transport.request(Stats()))
    identity, request = await fake.requests.get()
    fake.answer(identity, request.id, failed_of(Disconnected("unit 3 is away")))
    with pytest.raises(Disconnected, match="unit 3 is away"):
        await waiting


async def test_a_request_that_nobody_answers_ends_naming_who_waited_for_what_and_how_long(fake, transport):
    with pytest.raises(
        DeadlineExceeded, match=r"'rank-0' waited 0\.1 s for the controller .* to answer stats: .*look at"
    ):
        await transport.request(Stats(), timeout=0.1)


async def test_an_answer_that_comes_too_late_goes_to_the_orphanage(fake, transport):
    orphans = []
    transport.on_orphan = lambda body, reply: orphans.append((body, reply))
    with pytest.raises(DeadlineExceeded):
        await transport.request(Stats(), timeout=0.05)
    identity, request = await fake.requests.get()
    fake.answer(identity, request.id, Ok())
    waiting = asyncio.create_task(transport.request(ListKeys()))
    identity, request = await fake.requests.get()
    fake.answer(identity, request.id, Ok())
    await waiting
    assert orphans == [(Stats(), Ok())]


async def test_malformed_and_unknown_answers_are_ignored(fake, transport):
    waiting = asyncio.create_task(transport.request(Stats()))
    identity, request = await fake.requests.get()
    fake.send(identity, b"\xc1")
    fake.answer(identity, 999, Ok())
    fake.answer(identity, request.id, Ok())
    assert await waiting == Ok()


async def test_after_close_every_call_says_so(fake):
    transport = await SocketTransport.connect(fake.address, name="rank-1", timeout=5)
    waiting = asyncio.create_task(transport.request(Stats()))
    await fake.requests.get()
    await transport.close()
    with pytest.raises(Disconnected, match="'rank-1' was closed"):
        await waiting
    with pytest.raises(Disconnected):
        await transport.request(Stats())


async def test_what_cannot_be_sent_is_refused_at_once_and_forgotten(fake, transport):
    with pytest.raises(TypeError):
        await transport.request(Commit("p", ["a"], tags=[{"x": object()}]), timeout=1)
    with pytest.raises(Invalid, match=f"Clear takes .* bytes, the limit is {MAX_FRAME}"):
        await transport.request(Clear("p", ["x" * MAX_FRAME]), timeout=1)
    assert transport._waiters.waiting == {}


async def test_a_large_request_and_a_large_answer_arrive_whole(fake, transport):
    keys = [f"key-{i:030}" for i in range(100_000)]
    waiting = asyncio.create_task(transport.request(Clear("p", keys), timeout=30))
    identity, request = await fake.requests.get()
    assert request.body.keys == keys
    fake.answer(identity, request.id, Listing({"p": {key: {} for key in keys}}))
    while not waiting.done():
        fake.listener.flush()
        await asyncio.sleep(0.001)
    assert list((await waiting).partitions["p"]) == keys


async def test_a_forked_process_does_not_speak_for_its_parent(fake, transport):
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            transport.request(Stats()).send(None)
        except Disconnected as error:
            os.write(writable, str(error).encode())
        finally:
            os._exit(0)
    await asyncio.to_thread(os.waitpid, child, 0)
    assert b"which forked this one: connect anew here" in os.read(readable, 1000)
    waiting = asyncio.create_task(transport.request(Stats()))
    identity, request = await fake.requests.get()
    fake.answer(identity, request.id, Ok())
    await waiting


# --- the Unix stream alone ----------------------------------------------------------------------------------------


@pytest.fixture
async def unix(tmp_path):
    fake = FakeController(tmp_path, "unix")
    yield fake
    fake.die()


def stranger(fake: FakeController) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(fake.address["socket"].removeprefix("unix://"))
    return sock


def framed(*frames: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


IDENTITY = b"x" * 24


async def test_the_kernel_says_who_is_connected_and_when_it_ends(unix):
    sock = stranger(unix)
    sock.sendall(framed(IDENTITY, encode(Request(1, Stats()))))
    client, _ = await unix.requests.get()
    assert unix.pids == {os.getpid()}
    sock.close()
    async with asyncio.timeout(5):
        while unix.ended != [client]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not unix.listener.send(client, b"")


@pytest.mark.parametrize("cuts", [1, 3, 7])
async def test_frames_that_arrive_in_pieces_are_put_together(unix, cuts):
    sock = stranger(unix)
    data = framed(IDENTITY, *(encode(Request(i, ListKeys("p" * i))) for i in range(1, 40)))
    for at in range(0, len(data), cuts):
        sock.sendall(data[at : at + cuts])
        await asyncio.sleep(0)
    got = [(await unix.requests.get())[1] for _ in range(1, 40)]
    assert got == [Request(i, ListKeys("p" * i)) for i in range(1, 40)]
    sock.close()


@pytest.mark.parametrize("data", [
    b"\xff\xff\xff\xff", framed(b"short"), framed(b"x" * 300), framed(IDENTITY) + struct.pack("<I", STRANGER_LIMIT + 1),
])  # fmt: skip
async def test_who_breaks_the_rules_is_disconnected_before_memory_is_taken(unix, data):
    sock = stranger(unix)
    sock.sendall(data)
    assert await asyncio.to_thread(sock.recv, 1) == b""
    assert len(unix.refused) == 1
    sock.close()


async def test_a_client_that_names_its_identity_again_has_one_connection_the_last(unix):
    first, second = stranger(unix), stranger(unix)
    first.sendall(framed(IDENTITY, encode(Request(1, Stats()))))
    await unix.requests.get()
    second.sendall(framed(IDENTITY, encode(Request(2, Stats()))))
    client, _ = await unix.requests.get()
    assert await asyncio.to_thread(first.recv, 1) == b""
    unix.send(client, b"yes")
    assert await asyncio.to_thread(second.recv, 100) == framed(b"yes")
    for sock in (first, second):
        sock.close()


async def test_a_client_that_does_not_read_is_disconnected_and_the_others_are_served(unix, monkeypatch):
    monkeypatch.setattr("transfer_queue.net.stream.MAX_UNSENT", 1 << 20)
    sock = stranger(unix)
    sock.sendall(framed(IDENTITY, encode(Request(1, Stats()))))
    client, _ = await unix.requests.get()
    for _ in range(100):
        if unix.listener.send(client, bytes(100_000)):
            unix.listener.flush()
    assert not unix.listener.send(client, b"")
    assert "does not read" in unix.refused[0]
    transport = await SocketTransport.connect(unix.address, name="rank-0", timeout=5)
    await transport.close()
    sock.close()


async def test_who_shows_no_key_in_time_is_disconnected(tmp_path, monkeypatch):
    monkeypatch.setattr("transfer_queue.net.stream_listener.STRANGER_TIME", 0.05)
    fake = FakeController(tmp_path, "unix")
    silent = stranger(fake)
    transport = await SocketTransport.connect(fake.address, name="rank-0", timeout=5)
    assert await asyncio.to_thread(silent.recv, 1) == b""
    assert fake.refused == ["it did not show the key in time"]
    waiting = asyncio.create_task(transport.request(Stats()))
    client, request = await fake.requests.get()
    fake.answer(client, request.id, Ok())
    await waiting
    await transport.close()
    silent.close()
    fake.die()


async def test_without_descriptors_new_clients_wait_and_the_others_are_served(unix, monkeypatch, caplog):
    monkeypatch.setattr("transfer_queue.net.stream_listener.ACCEPT_PAUSE", 0.2)
    served = await SocketTransport.connect(unix.address, name="rank-0", timeout=5)
    late = socket.socket(socket.AF_UNIX)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        late.connect(unix.address["socket"].removeprefix("unix://"))
        waiting = asyncio.create_task(served.request(Stats()))
        client, request = await unix.requests.get()
        unix.answer(client, request.id, Ok())
        await waiting
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "one could not be accepted: [Errno 24]" in caplog.text
    late.sendall(framed(IDENTITY, encode(Request(1, ListKeys()))))
    assert (await asyncio.wait_for(unix.requests.get(), 5))[1].body == ListKeys()
    await served.close()
    late.close()


# --- frames and endpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"\x91" * 100_000, b"\x92\x01\x81\xa4type\xa3Foo", encode(Response(1, Ok())), b"\x92\xff\x80"],
)
def test_a_frame_that_is_no_request_is_malformed_and_nothing_else(frame):
    with pytest.raises(Malformed):
        decode_request(frame)


def test_endpoints_are_private_sockets_with_short_paths(tmp_path):
    for endpoint, why in (
        ("tcp://0.0.0.0:1", "CURVE"),
        ("inproc://x", "expected ipc"),
        (f"ipc:///{'x' * 200}", "shorter"),
    ):
        with pytest.raises(Invalid, match=why):
            check_endpoint(endpoint)
    os.chmod(tmp_path, 0o755)
    with pytest.raises(Invalid, match="mode 0700"):
        bind_private(zmq.Context.instance().socket(zmq.ROUTER), f"ipc://{tmp_path}/c")
