"""Bulk bytes for clients that cannot map a unit's segments: raw frames over the unit's own socket.

    client  [BulkOpen]                  ->  unit  [BulkOpened]                 again when the unit has been restarted
    client  [BulkRead][][MAC]           ->  unit  [BulkDone][bytes][MAC]
    client  [BulkWrite][bytes][MAC]     ->  unit  [BulkDone][][MAC]

Each request is answered on its own; both kinds may be repeated without harm, since a place in a segment is written
once. Chunks of at most 8 MiB, at most WINDOW bytes on their way per client. Who sent a frame, and that it is
the one that was sent, is told by its MAC (net/bulk_session.py); what has none is counted and gets no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from transfer_queue.errors import BY_CODE, DeadlineExceeded, Disconnected, Invalid, QueueError
from transfer_queue.failpoints import failpoint
from transfer_queue.net.bulk_session import (
    NONCE,
    TO_CLIENT,
    TO_UNIT,
    Sessions,
    frame_mac,
    new_nonce,
    opened_mac,
    session_key,
)
from transfer_queue.net.credentials import credentials
from transfer_queue.net.curve import SEALED, NetworkListener, connect_to, is_network
from transfer_queue.net.messages import Message
from transfer_queue.net.nuisance import Nuisance
from transfer_queue.net.sockets import EventSocket, bind_private, check_endpoint
from transfer_queue.storage.private import text_if_there
from transfer_queue.storage.unit_files import UnitFiles, replace_file

log = logging.getLogger(__name__)

CHUNK = 8 << 20
"""Bytes per frame."""

WINDOW = 32 << 20
"""Bytes on their way between a unit and one client."""

LEAST = 2 << 20
"""What the smallest chunk counts in the window."""

BACKLOG = WINDOW // LEAST
"""Answers that a unit keeps for a client that does not read them; it asks again for those that are dropped."""

RETRY_AFTER = 2.0
"""Seconds without an answer after which a chunk is asked for again: the unit may have been restarted."""


class BulkOpen(Message, frozen=True, tag=True):
    session: bytes


class BulkOpened(Message, frozen=True, tag=True):
    session: bytes
    unit: bytes  # the unit's nonce, new in each of its lives
    mac: bytes


class BulkRead(Message, frozen=True, tag=True):
    id: int
    session: bytes
    unit: bytes
    segment: int
    offset: int
    nbytes: int


class BulkWrite(Message, frozen=True, tag=True):
    id: int
    session: bytes
    unit: bytes
    segment: int
    offset: int


class BulkDone(Message, frozen=True, tag=True):
    id: int
    code: str = ""
    message: str = ""


_request_decoder = msgspec.msgpack.Decoder(BulkOpen | BulkRead | BulkWrite)
_answer_decoder = msgspec.msgpack.Decoder(BulkOpened | BulkDone)
_encoder = msgspec.msgpack.Encoder()


class BulkServer:
    """The unit's side, at `endpoint`. A malformed or unauthorised message is counted and gets no answer."""

    def __init__(self, files: UnitFiles, endpoint: str, key: str) -> None:
        """An endpoint by TCP may leave the port open ("tcp://IP:*"): it is then the one that this unit had before, if
        that is free, so that clients find it again."""
        keys = credentials(key)
        self._files = files
        self._sessions = Sessions(keys.bulk)
        self._strangers = Nuisance(log, f"unit {files.unit}: a bulk frame without a right MAC was ignored")
        options = [(zmq.MAXMSGSIZE, CHUNK + SEALED), (zmq.SNDHWM, BACKLOG), (zmq.RCVHWM, 2 * BACKLOG)]
        self._socket: EventSocket | NetworkListener
        if is_network(endpoint):
            self._socket = _listen_where_before(
                files.directory / "port", endpoint, lambda at: NetworkListener(at, keys, self._serve, options)
            )
            self.endpoint = self._socket.endpoint
            return
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        for option, value in (*options, (zmq.ROUTER_MANDATORY, 1)):
            socket.setsockopt(option, value)
        bind_private(socket, endpoint)
        self._socket = EventSocket(socket, self._serve)
        self.endpoint = endpoint

    @property
    def refused(self) -> int:
        """Messages ignored so far."""
        return self._strangers.count

    def close(self) -> None:
        self._socket.close()

    def _serve(self, frames: list[bytes]) -> None:
        peer, *rest = frames
        try:
            request = _request_decoder.decode(rest[0])
        except (msgspec.MsgspecError, IndexError, RecursionError) as error:
            self._strangers.note(error)
            return
        if len(request.session) != NONCE:
            self._strangers.note("a session of another length")
            return
        if isinstance(request, BulkOpen) or request.unit != self._sessions.nonce:
            opened = BulkOpened(request.session, self._sessions.nonce, self._sessions.opened(request.session))
            return self._send([peer, _encoder.encode(opened)])
        header, data, mac = rest if len(rest) == 3 else (b"", b"", b"")
        key = self._sessions.accept(request.session, request.id, header, data, mac)
        if key is None:
            self._strangers.note()
            return
        done, found = self._do(request, data)
        failpoint("unit.before_answer")
        answer = _encoder.encode(done)
        self._send([peer, answer, found, frame_mac(key, TO_CLIENT, request.id, answer, found)])

    def _do(self, request: BulkRead | BulkWrite, data: bytes) -> tuple[BulkDone, bytes]:
        try:
            if isinstance(request, BulkRead):
                return BulkDone(request.id), self._files.read(
                    request.segment, request.offset, min(request.nbytes, CHUNK)
                )
            self._files.write(request.segment, request.offset, data)
        except QueueError as error:
            return BulkDone(request.id, error.code, str(error)), b""
        return BulkDone(request.id), b""

    def _send(self, frames: list[bytes]) -> None:
        try:
            self._socket.send(frames)
        except zmq.ZMQError as error:  # gone, or does not read: it asks again if it still wants the answer
            log.info("a bulk answer could not be sent: %s", error)


class BulkClient:
    """One connection to one unit's socket."""

    def __init__(
        self, endpoint: str, key: str, *, name: str, timeout: float = 30.0,
        check_open: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`check_open` raises QueueClosed once nobody need wait for the unit any more."""
        self._check_open = check_open
        self._endpoint = endpoint
        self._bulk_key = credentials(key).bulk
        self._name = name
        self._timeout = timeout
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes | None]] = {}
        self._window = ByteWindow(WINDOW)
        self._session = new_nonce()
        self._unit = b""  # the nonce of the unit's present life; "" before it has answered
        self._session_key = b""
        self._opened = asyncio.Event()
        self._ended: QueueError | None = None  # once it is closed
        socket = zmq.Context.instance().socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.RECONNECT_IVL, 20), (zmq.MAXMSGSIZE, CHUNK + SEALED)):
            socket.setsockopt(option, value)
        if is_network(endpoint):
            connect_to(socket, endpoint, credentials(key))
        else:
            check_endpoint(endpoint)
            socket.connect(endpoint)
        self._socket = EventSocket(socket, self._on_frames)

    async def read(self, segment: int, offset: int, nbytes: int) -> np.ndarray:
        """Bytes of a segment, as a private array."""
        out = np.empty(nbytes, np.uint8)

        async def chunk(at: int, size: int) -> None:
            data = await self._ask(
                lambda i: BulkRead(i, self._session, self._unit, segment, offset + at, size), b"", size
            )
            if len(data) != size:
                raise Disconnected(f"unit at {self._endpoint} sent {len(data)} bytes of {size}")
            out[at : at + size] = np.frombuffer(data, np.uint8)

        await _all([chunk(at, min(CHUNK, nbytes - at)) for at in range(0, nbytes, CHUNK)])
        return out

    async def write(self, segment: int, offset: int, data: np.ndarray) -> None:
        """Store bytes in a segment that this client was granted."""
        view = data.data

        async def chunk(at: int) -> None:
            part = view[at : at + CHUNK]
            await self._ask(lambda i: BulkWrite(i, self._session, self._unit, segment, offset + at), part, len(part))

        await _all([chunk(at) for at in range(0, len(view), CHUNK)])

    def close(self, error: QueueError | None = None) -> None:
        """What still waits raises `error`."""
        self._ended = error or Disconnected(f"client {self._name!r} was closed")
        self._socket.close()
        self._opened.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._ended)

    async def _ask(self, make: Callable[[int], BulkRead | BulkWrite], data: bytes | memoryview, nbytes: int) -> bytes:
        """One chunk there or back, repeated until it is answered. Every try has an id, and so a MAC, of its own."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout
        await self._window.take(nbytes)
        try:
            while clock() < deadline:
                self._check_open()
                if not self._opened.is_set() and not await self._open(min(RETRY_AFTER, deadline - clock())):
                    continue
                answer = await self._try(make, data, min(RETRY_AFTER, deadline - clock()))
                if answer is not None:
                    return answer
        finally:
            self._window.give(nbytes)
        raise DeadlineExceeded(
            f"client {self._name!r} waited {self._timeout:.0f} s for storage unit {self._endpoint}; is it running, "
            "and has this process the key of its run?"
        )

    async def _try(
        self, make: Callable[[int], BulkRead | BulkWrite], data: bytes | memoryview, patience: float
    ) -> bytes | None:
        """The answer, or None: ask again."""
        number = next(self._ids)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        header = _encoder.encode(make(number))
        self._send([header, data, frame_mac(self._session_key, TO_UNIT, number, header, data)])
        try:
            await asyncio.wait([future], timeout=patience)
            return future.result() if future.done() else None
        finally:
            del self._waiting[number]

    async def _open(self, patience: float) -> bool:
        """Whether the unit has proved itself, in one try."""
        self._send([_encoder.encode(BulkOpen(self._session))])
        try:
            await asyncio.wait_for(self._opened.wait(), patience)
        except TimeoutError:
            return False
        if self._ended is not None:
            raise self._ended
        return True

    def _send(self, frames: Sequence[bytes | memoryview]) -> None:
        if self._ended is not None:
            raise self._ended
        try:
            self._socket.send(frames)
        except zmq.Again:
            log.info("the storage unit at %s takes nothing now; trying again", self._endpoint)

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            answer = _answer_decoder.decode(frames[0])
        except (msgspec.MsgspecError, RecursionError):
            log.error("a malformed bulk answer from %s was ignored", self._endpoint)
            return
        if isinstance(answer, BulkOpened):
            return self._on_opened(answer)
        future = self._waiting.get(answer.id)
        if future is None or future.done():
            return
        header, data, mac = frames if len(frames) == 3 else (b"", b"", b"")
        if not hmac.compare_digest(mac, frame_mac(self._session_key, TO_CLIENT, answer.id, header, data)):
            log.error("a bulk answer from %s has a wrong MAC and was ignored", self._endpoint)
        elif answer.code:
            future.set_exception(BY_CODE.get(answer.code, QueueError)(answer.message))
        else:
            future.set_result(data)

    def _on_opened(self, answer: BulkOpened) -> None:
        """The unit began a new life (or its first that we see): what was asked of the old one is asked again."""
        right = hmac.compare_digest(answer.mac, opened_mac(self._bulk_key, self._session, answer.unit))
        if answer.session != self._session or not right:
            log.error("the storage unit at %s has another key than this client", self._endpoint)
        elif answer.unit != self._unit:
            self._unit = answer.unit
            self._session_key = session_key(self._bulk_key, self._session, answer.unit)
            self._opened.set()
            for future in self._waiting.values():
                if not future.done():
                    future.set_result(None)


def _listen_where_before(memory: Path, endpoint: str, listen: Callable[[str], NetworkListener]) -> NetworkListener:
    """Listen at the port that stands in `memory`, or at another one, which is then written there."""
    place, _, port = endpoint.rpartition(":")
    if port != "*":
        return listen(endpoint)
    known = text_if_there(memory) or ""
    listener = None
    if known.isdecimal():
        with contextlib.suppress(Invalid):
            listener = listen(f"{place}:{known}")
    if listener is None:
        listener = listen(endpoint)
        replace_file(memory, listener.endpoint.rpartition(":")[2])
    return listener


class ByteWindow:
    """At most `size` bytes on their way, a chunk counting LEAST at least; who waits is served in order of arrival."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, nbytes: int) -> None:
        cost = max(nbytes, LEAST)
        if not self._waiting and cost <= self._free:
            self._free -= cost
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((cost, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had come
                self.give(nbytes)
            self._serve()
            raise

    def give(self, nbytes: int) -> None:
        self._free += max(nbytes, LEAST)
        self._serve()

    def _serve(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._free):
            cost, turn = self._waiting.popleft()
            if not turn.done():  # else: cancelled
                self._free -= cost
                turn.set_result(None)


async def _all(work: list[Coroutine[Any, Any, Any]]) -> None:
    """Run all; the first failure ends the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
