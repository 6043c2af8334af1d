"""The controller's process: one ROUTER socket around the sans-IO core, and a watch on its clients' processes.

    consumes     request frames; ends of client processes (pidfd); time
    produces     response frames and pushes to units
    waits for    its socket, a client's death, or the core's next deadline, and nothing else
    woken by     exactly these; it never polls

Frames: [identity][Request] in, [identity][Response] out. The identity is the client's own random name for itself; the
core answers nobody who has not said Hello with the run's key.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from transfer_queue.controller_core import ControllerCore
from transfer_queue.net.codec import MAX_FRAME, decode_request, encode
from transfer_queue.net.messages import Bye, Hello, Response, Welcome
from transfer_queue.net.sockets import EventSocket, bind_private
from transfer_queue.net.transport import host_id, read_key
from transfer_queue.processes import exited
from transfer_queue.storage.unit_files import lock_file

log = logging.getLogger(__name__)

PEER_BACKLOG = 10_000
"""Responses kept for a client that does not read them; more are dropped, and it asks again after it reconnects."""

MAX_PID = 2**31 - 1
"""What a Hello names beyond this, or below 1, is no process: its client is served, its death goes unnoticed."""


class ControllerServer:
    """Invariant: nothing that a peer sends ends the server; what is not understood is counted and ignored."""

    def __init__(self, endpoint: str, make_core: Callable[[Callable[[str, Response], None]], ControllerCore]) -> None:
        self._loop = asyncio.get_running_loop()
        self._host = host_id()
        self._greeting: dict[str, Hello] = {}
        self._watched: dict[str, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._arming = False
        self.malformed = 0
        self._core = make_core(self._send)
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1), (zmq.ROUTER_HANDOVER, 1), (zmq.MAXMSGSIZE, MAX_FRAME), (zmq.LINGER, 0),
            (zmq.SNDHWM, PEER_BACKLOG), (zmq.RCVHWM, 0), (zmq.BACKLOG, 4096),
        ):  # fmt: skip
            socket.setsockopt(option, value)
        bind_private(socket, endpoint)
        self._socket = EventSocket(socket, self._on_frames)
        self._arm_soon()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for watch in self._watched.values():
            watch.cancel()
        self._socket.close(linger_ms=200)
        self._core.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            identity, frame = frames
            request = decode_request(frame)
        except ValueError as error:  # Malformed, or another number of frames
            self._refuse(error)
            return
        client = identity.decode("latin-1")
        if isinstance(request.body, Hello):
            self._greeting[client] = request.body
        self._core.handle(client, request, time.monotonic())
        self._greeting.pop(client, None)
        if isinstance(request.body, Bye):
            self._unwatch(client)
        self._arm_soon()

    def _refuse(self, error: ValueError) -> None:
        self.malformed += 1
        if self.malformed & (self.malformed - 1) == 0:  # 1, 2, 4, 8, ...: a flood does not fill the disk
            log.warning("a malformed message was ignored (%d so far): %s", self.malformed, error)

    def _send(self, client: str, response: Response) -> None:
        try:
            self._socket.send([client.encode("latin-1"), encode(response)])
        except zmq.Again:
            log.warning("client %s does not read its answers; one was dropped", _short(client))
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            log.debug("client %s is not connected; its answer was dropped", _short(client))
            return
        if isinstance(response.body, Welcome) and client in self._greeting:
            self._watch(client, self._greeting[client])

    def _watch(self, client: str, hello: Hello) -> None:
        """Hear at once of the death of a client on this host."""
        if client in self._watched or not 0 < hello.pid <= MAX_PID:
            return
        if hello.host != self._host:
            log.warning("client %s is not of this pid namespace: its death goes unnoticed", _short(client))
            return
        try:
            watch = exited(hello.pid)
        except OSError as error:  # not a process, or no descriptor is left
            log.warning("client %s, process %d: its death goes unnoticed: %s", _short(client), hello.pid, error)
            return
        self._watched[client] = watch
        watch.add_done_callback(functools.partial(self._gone, client))

    def _gone(self, client: str, watch: asyncio.Future[None]) -> None:
        if not watch.cancelled() and self._watched.pop(client, None) is not None:
            log.info("the process of client %s has ended", _short(client))
            self._core.client_gone(client, time.monotonic())
            self._arm_soon()

    def _unwatch(self, client: str) -> None:
        watch = self._watched.pop(client, None)
        if watch is not None:
            watch.cancel()

    def _arm_soon(self) -> None:
        """Set the timer once per turn of the loop."""
        if not self._arming:
            self._arming = True
            self._loop.call_soon(self._arm)

    def _arm(self) -> None:
        self._arming = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._core.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - time.monotonic()), self._tick)

    def _tick(self) -> None:
        """Requests that came in time but lie in the socket count before the deadline does."""
        self._socket.drain()
        self._core.tick(time.monotonic())
        self._arm_soon()


async def serve_controller(
    directory: Path, endpoint: str, *, run: str, key_file: str, stop: asyncio.Event, segment_bytes: int,
    ready: Callable[[], None], fsync: bool = False,
) -> None:  # fmt: skip
    """Run the controller of `directory` until `stop`; it goes on where the journal there ends. Raises Corrupt."""
    lock = lock_file(directory / "controller.lock", "the controller", wait=5.0)
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(functools.partial(_fail, failed))

    def make_core(send: Callable[[str, Response], None]) -> ControllerCore:
        return ControllerCore.recover(
            directory / "journal", send=send, now=time.monotonic(), run=run, key=read_key(key_file),
            segment_bytes=segment_bytes, fsync=fsync,
        )  # fmt: skip

    server = ControllerServer(endpoint, make_core)
    try:
        ready()
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait([stopped, failed], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if failed.done():
            failed.result()
    finally:
        server.close()
        os.close(lock)


def _fail(failed: asyncio.Future[None], loop: asyncio.AbstractEventLoop, context: dict) -> None:
    """An exception out of the core (a bug, a full disk) ends the process: memory may be ahead of the journal."""
    loop.default_exception_handler(context)
    if not failed.done():
        failed.set_exception(context.get("exception") or RuntimeError(context["message"]))


def _short(client: str) -> str:
    """A client without the part of its identity that is secret."""
    return client.rpartition(".")[0] or "?"
