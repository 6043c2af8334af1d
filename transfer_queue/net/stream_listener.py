"""The controller's end of the Unix streams (see stream.py): all connections on one epoll, which the loop watches.

A turn reads a few connections and then lets the answers go, so the first of many is not kept waiting by the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

from transfer_queue.net.codec import MAX_FRAME
from transfer_queue.net.sockets import check_private
from transfer_queue.net.stream import Stream

log = logging.getLogger(__name__)

STRANGER_LIMIT = 16 << 10
"""Largest frame of who has not shown the run's key yet: an identity and a Hello."""

STRANGER_TIME = 30.0
"""Seconds in which a new connection must show the key."""

AT_ONCE = 16
"""Connections read before their answers go out: the first must not wait for the thousandth."""

ACCEPT_PAUSE = 1.0
"""Seconds without new connections after one could not be accepted (no descriptors left)."""

_CREDENTIALS = struct.Struct("3i")


class _Peer:
    """A connection to the controller: a stranger until it is welcomed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.client = ""
        self.stream: Stream | None = None
        self.patience: asyncio.TimerHandle | None = None


class StreamListener:
    """Invariant: a client has one connection, the last that named its identity; only this user's processes have any."""

    def __init__(
        self, path: str, *, on_frame: Callable[[str, memoryview, int], None], on_turn: Callable[[], None],
        on_end: Callable[[str], None], refuse: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`on_frame(client, frame, pid)` for each request; `on_turn()` when a few connections have been read, to have
        the answers sent; `on_end(client)` when its connection is gone; `refuse(why)` when one broke the rules.
        Raises Invalid unless the directory is private."""
        check_private(Path(path).parent)
        self._on_frame, self._on_turn, self._on_end, self._refuse = on_frame, on_turn, on_end, refuse
        self._loop = asyncio.get_running_loop()
        self._peers: dict[int, _Peer] = {}
        self._clients: dict[str, _Peer] = {}
        self._dirty: set[Stream] = set()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._sock.bind(path)
        self._sock.listen(4096)
        self._epoll = select.epoll()
        self._epoll.register(self._sock.fileno(), select.EPOLLIN)
        self._loop.add_reader(self._epoll.fileno(), self.turn)

    def send(self, client: str, frame: bytes) -> bool:
        """Queue an answer for the next `flush`; False if the client has no connection now."""
        peer = self._clients.get(client)
        stream = None if peer is None else peer.stream
        if stream is None:
            return False
        stream.queue(frame)
        self._dirty.add(stream)
        return not stream.closed

    def flush(self) -> None:
        """Send what is queued, as far as its receivers have room."""
        dirty, self._dirty = self._dirty, set()
        for stream in dirty:
            if not stream.flush() and not stream.closed:
                self._epoll.modify(stream.fd, select.EPOLLIN | select.EPOLLOUT)

    def trust(self, client: str) -> None:
        """It has shown the key: its frames may be large, and it may stay."""
        peer = self._clients.get(client)
        if peer is not None and peer.stream is not None:
            peer.stream.limit = MAX_FRAME
            if peer.patience is not None:
                peer.patience.cancel()

    def turn(self) -> None:
        """Read what a few connections have sent."""
        for fd, events in self._epoll.poll(0, AT_ONCE):
            peer = self._peers.get(fd)
            if fd == self._sock.fileno():
                self._accept()
            elif peer is not None and peer.stream is not None:
                self._serve(peer.stream, events)
        self._on_turn()

    def drain(self) -> None:
        """Read what has already arrived: a few turns at most."""
        for _ in range(1 + len(self._peers) // AT_ONCE):
            if not self._epoll.poll(0, 1):
                return
            self.turn()

    def close(self) -> None:
        if self._epoll.closed:
            return
        self._loop.remove_reader(self._epoll.fileno())
        self.flush()
        self._on_end = lambda _: None
        for peer in list(self._peers.values()):
            if peer.stream is not None:
                peer.stream.end("")
        self._sock.close()
        self._epoll.close()

    def _serve(self, stream: Stream, events: int) -> None:
        if events & select.EPOLLOUT and stream.flush() and not stream.closed:
            self._epoll.modify(stream.fd, select.EPOLLIN)
        if events & ~select.EPOLLOUT and not stream.closed:
            stream.read()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            log.error("connections wait, since one could not be accepted: %s", error)
            self._epoll.modify(self._sock.fileno(), 0)
            self._loop.call_later(ACCEPT_PAUSE, self._accept_again)
            return
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid not in (os.getuid(), 0):
            self._refuse(f"it is of user {uid}")
            sock.close()
            return
        peer = _Peer(pid)
        peer.stream = Stream(sock, partial(self._frame, peer), partial(self._ended, peer), STRANGER_LIMIT)
        peer.patience = self._loop.call_later(STRANGER_TIME, peer.stream.end, "it did not show the key in time")
        self._peers[peer.stream.fd] = peer
        self._epoll.register(peer.stream.fd, select.EPOLLIN)

    def _accept_again(self) -> None:
        if not self._epoll.closed:
            self._epoll.modify(self._sock.fileno(), select.EPOLLIN)

    def _frame(self, peer: _Peer, frame: memoryview) -> None:
        if peer.client:
            self._on_frame(peer.client, frame, peer.pid)
            return
        client = bytes(frame).decode("latin-1")
        if not 16 <= len(client) <= 255:
            assert peer.stream is not None
            peer.stream.end(f"an identity of {len(client)} bytes")
            return
        before = self._clients.pop(client, None)
        if before is not None and before.stream is not None:
            before.stream.end("")
        peer.client = client
        self._clients[client] = peer

    def _ended(self, peer: _Peer, reason: str) -> None:
        stream = peer.stream
        assert stream is not None
        if peer.patience is not None:
            peer.patience.cancel()
        self._epoll.unregister(stream.fd)
        self._peers.pop(stream.fd, None)
        self._dirty.discard(stream)
        peer.stream = None
        if reason:
            self._refuse(reason)
        if self._clients.get(peer.client) is peer:
            del self._clients[peer.client]
            self._on_end(peer.client)
