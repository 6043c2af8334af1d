"""ZeroMQ sockets on an asyncio loop, without zmq.asyncio's futures (half of the latency of a round trip).

A ZeroMQ fd is edge-triggered: it may fire once for many messages, and any send or receive may swallow the edge. So
whoever touches the socket has to look again afterwards, which `EventSocket` does.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from transfer_queue.errors import Invalid

MAX_IPC_PATH = 107
"""Longest path of a Unix socket (sun_path is 108 bytes with its final zero)."""

_BURST = 256
"""Messages handled before other work of the loop gets a turn."""


class EventSocket:
    """Calls `on_frames` for each message that arrives; `send` never blocks."""

    def __init__(self, socket: zmq.Socket, on_frames: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        self._loop.add_reader(self._fd, self._receive)
        self._look_again()

    def send(self, frames: Sequence[bytes | memoryview], *, copy: bool = True) -> None:
        """Raises zmq.Again (no room or no peer yet) or zmq.ZMQError(EHOSTUNREACH) (a ROUTER's peer is gone)."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
        finally:
            self._look_again()

    def drain(self) -> None:
        """Handle what has already arrived, now."""
        self._receive()

    def close(self, linger_ms: int = 0) -> None:
        if not self.socket.closed:
            self._loop.remove_reader(self._fd)
            self.socket.close(linger=linger_ms)

    def _look_again(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        self._scheduled = False
        for _ in range(_BURST):
            if self.socket.closed:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_frames(frames)
            except BaseException:  # what else has arrived must not be forgotten with it
                self._look_again()
                raise
        self._look_again()


def check_endpoint(endpoint: str, schemes: Sequence[str] = ("ipc",)) -> str:
    """The path of an endpoint on this node. Raises Invalid for one that is not served, or whose path is too long."""
    scheme, _, path = endpoint.partition("://")
    if scheme == "tcp":
        raise Invalid(f"{endpoint}: requests by TCP need CURVE keys; use curve://IP:PORT, or a path on this node")
    if scheme not in schemes or not path:
        raise Invalid(f"{endpoint!r} is not an endpoint; expected {' or '.join(f'{name}://PATH' for name in schemes)}")
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise Invalid(f"socket path of {len(path)} bytes, the limit is {MAX_IPC_PATH}: {path}; use a shorter directory")
    return path


def bind_private(socket: zmq.Socket, endpoint: str) -> None:
    """Bind an ipc endpoint. Raises Invalid unless its directory is ours and of mode 0700."""
    check_private(Path(check_endpoint(endpoint)).parent)
    socket.bind(endpoint)


def check_private(directory: Path) -> None:
    """Raise Invalid unless only this user can reach what is in `directory`."""
    info = directory.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise Invalid(f"{directory} must belong to uid {os.getuid()} with mode 0700, else others could use the socket")
