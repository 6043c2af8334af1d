"""Bulk bytes for clients that cannot map a unit's segments: raw frames over the unit's own socket.

    client  [BulkRead]             ->  unit  [BulkDone][bytes]
    client  [BulkWrite][bytes]     ->  unit  [BulkDone]

Each request carries the run's key and is answered on its own; both kinds may be repeated without harm, since a place
in a segment is written once. Chunks of at most 8 MiB, a few on their way at a time.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from transfer_queue.errors import BY_CODE, DeadlineExceeded, Disconnected, QueueError
from transfer_queue.net.messages import Message
from transfer_queue.net.sockets import EventSocket, bind_private, check_endpoint
from transfer_queue.storage.unit_files import UnitFiles

log = logging.getLogger(__name__)

CHUNK = 8 << 20
"""Bytes per frame."""

WINDOW = 4
"""Chunks on their way per unit and client."""

RETRY_AFTER = 2.0
"""Seconds without an answer after which a chunk is asked for again: the unit may have been restarted."""


class BulkRead(Message, frozen=True, tag=True):
    id: int
    key: str
    segment: int
    offset: int
    nbytes: int


class BulkWrite(Message, frozen=True, tag=True):
    id: int
    key: str
    segment: int
    offset: int


class BulkDone(Message, frozen=True):
    id: int
    code: str = ""
    message: str = ""


_request_decoder = msgspec.msgpack.Decoder(BulkRead | BulkWrite)
_done_decoder = msgspec.msgpack.Decoder(BulkDone)
_encoder = msgspec.msgpack.Encoder()


class BulkServer:
    """The unit's side. A malformed or unauthorised message is counted and gets no answer."""

    def __init__(self, files: UnitFiles, endpoint: str, key: str) -> None:
        self._files = files
        self._key = key.encode()
        self.refused = 0
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, CHUNK)
        socket.setsockopt(zmq.SNDHWM, 2 * WINDOW)
        socket.setsockopt(zmq.RCVHWM, 2 * WINDOW)
        bind_private(socket, endpoint)
        self._socket = EventSocket(socket, self._serve)

    def close(self) -> None:
        self._socket.close()

    def _serve(self, frames: list[bytes]) -> None:
        peer, *rest = frames
        try:
            request = _request_decoder.decode(rest[0])
        except (msgspec.MsgspecError, IndexError, RecursionError):
            self.refused += 1
            log.warning("a malformed bulk request was ignored (%d so far)", self.refused)
            return
        if not hmac.compare_digest(request.key.encode(), self._key):
            self.refused += 1
            log.warning("a bulk request with a wrong key was ignored (%d so far)", self.refused)
            return
        done, data = BulkDone(request.id), []
        try:
            if isinstance(request, BulkRead):
                data = [self._files.read(request.segment, request.offset, min(request.nbytes, CHUNK))]
            else:
                self._files.write(request.segment, request.offset, rest[1] if len(rest) > 1 else b"")
        except QueueError as error:
            done = BulkDone(request.id, error.code, str(error))
        try:
            self._socket.send([peer, _encoder.encode(done), *data])
        except zmq.ZMQError as error:  # gone, or does not read: it asks again if it still wants the answer
            log.info("a bulk answer could not be sent: %s", error)


class BulkClient:
    """One connection to one unit's socket."""

    def __init__(self, endpoint: str, key: str, *, name: str, timeout: float = 30.0) -> None:
        check_endpoint(endpoint)
        self._endpoint = endpoint
        self._key = key
        self._name = name
        self._timeout = timeout
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._window = asyncio.Semaphore(WINDOW)
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.connect(endpoint)
        self._socket = EventSocket(socket, self._on_frames)

    async def read(self, segment: int, offset: int, nbytes: int) -> np.ndarray:
        """Bytes of a segment, as a private array."""
        out = np.empty(nbytes, np.uint8)

        async def chunk(at: int, size: int) -> None:
            data = await self._ask(lambda i: BulkRead(i, self._key, segment, offset + at, size), b"")
            if len(data) != size:
                raise Disconnected(f"unit at {self._endpoint} sent {len(data)} bytes of {size}")
            out[at : at + size] = np.frombuffer(data, np.uint8)

        await _all([chunk(at, min(CHUNK, nbytes - at)) for at in range(0, nbytes, CHUNK)])
        return out

    async def write(self, segment: int, offset: int, data: np.ndarray) -> None:
        """Store bytes in a segment that this client was granted."""
        view = data.data
        await _all(
            [
                self._ask(lambda i, at=at: BulkWrite(i, self._key, segment, offset + at), view[at : at + CHUNK])
                for at in range(0, len(view), CHUNK)
            ]
        )

    def close(self) -> None:
        self._socket.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Disconnected(f"client {self._name!r} was closed"))

    async def _ask(self, make: Callable[[int], BulkRead | BulkWrite], data: bytes | memoryview) -> bytes:
        """One chunk there or back, repeated until it is answered."""
        async with self._window:
            number = next(self._ids)
            future = self._waiting[number] = asyncio.get_running_loop().create_future()
            frames = [_encoder.encode(make(number)), *([data] if len(data) else [])]
            try:
                for _ in range(max(1, round(self._timeout / RETRY_AFTER))):
                    self._send(frames)
                    await asyncio.wait([future], timeout=RETRY_AFTER)
                    if future.done():
                        return future.result()
            finally:
                del self._waiting[number]
        raise DeadlineExceeded(
            f"client {self._name!r} waited {self._timeout:.0f} s for storage unit {self._endpoint}; is it running?"
        )

    def _send(self, frames: Sequence[bytes | memoryview]) -> None:
        try:
            self._socket.send(frames)
        except zmq.Again:
            log.info("the storage unit at %s takes nothing now; trying again", self._endpoint)

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            done = _done_decoder.decode(frames[0])
        except msgspec.MsgspecError:
            log.error("a malformed bulk answer from %s was ignored", self._endpoint)
            return
        future = self._waiting.get(done.id)
        if future is None or future.done():
            return
        if done.code:
            future.set_exception(BY_CODE.get(done.code, QueueError)(done.message))
        else:
            future.set_result(frames[1] if len(frames) > 1 else b"")


async def _all(work: list[Coroutine[Any, Any, Any]]) -> None:
    """Run all; the first failure ends the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
