"""ZmqTransport against a controller that misbehaves as only a fake one does."""

from __future__ import annotations

import asyncio
import os

import pytest
import zmq

from transfer_queue.errors import DeadlineExceeded, Disconnected, Invalid
from transfer_queue.net.codec import SAY_HELLO, Malformed, decode_request, encode, failed_of
from transfer_queue.net.messages import (
    Bye,
    Failed,
    Hello,
    Lease,
    Leased,
    Listing,
    ListKeys,
    Ok,
    Response,
    Stats,
    Token,
    Welcome,
)
from transfer_queue.net.sockets import EventSocket, bind_private, check_endpoint
from transfer_queue.net.transport import ZmqTransport


class FakeController:
    """Welcomes everybody with its epoch; notes all other requests and leaves the answering to the test."""

    def __init__(self, directory, *, epoch: int = 1) -> None:
        os.chmod(directory, 0o700)
        (directory / "key").write_text("ab" * 32)
        self.address = {"run": "r", "socket": f"ipc://{directory}/c", "key_file": str(directory / "key")}
        self.epoch = epoch
        self.requests: asyncio.Queue = asyncio.Queue()
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        bind_private(socket, self.address["socket"])
        self.socket = EventSocket(socket, self._on_frames)

    def _on_frames(self, frames: list[bytes]) -> None:
        request = decode_request(frames[1])
        if isinstance(request.body, Hello):
            self.answer(frames[0], request.id, Welcome(self.epoch, []))
        elif isinstance(request.body, Bye):
            self.answer(frames[0], request.id, Ok())
        else:
            self.requests.put_nowait((frames[0], request))

    def answer(self, identity: bytes, request: int, body) -> None:
        self.socket.send([identity, encode(Response(request, body))])

    def die(self) -> None:
        self.socket.close()


@pytest.fixture
async def fake(tmp_path):
    fake = FakeController(tmp_path)
    yield fake
    fake.die()


@pytest.fixture
async def transport(fake):
    transport = await ZmqTransport.connect(fake.address, name="rank-0", timeout=5)
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
    again = FakeController(tmp_path, epoch=2)
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
        DeadlineExceeded, match=r"'rank-0' waited 0\.1 s for the controller .* to answer Stats: .*look at"
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
    fake.socket.send([identity, b"\xc1"])
    fake.answer(identity, 999, Ok())
    fake.answer(identity, request.id, Ok())
    assert await waiting == Ok()


async def test_after_close_every_call_says_so(fake):
    transport = await ZmqTransport.connect(fake.address, name="rank-1", timeout=5)
    waiting = asyncio.create_task(transport.request(Stats()))
    await fake.requests.get()
    await transport.close()
    with pytest.raises(Disconnected, match="'rank-1' was closed"):
        await waiting
    with pytest.raises(Disconnected):
        await transport.request(Stats())


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
