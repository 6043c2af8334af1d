"""Frames over a Unix stream socket: how processes of one node talk to the controller.

    frame       length (u32, little-endian), then so many bytes; one after the other, in both directions
    client      its identity as the first frame, then Request frames
    controller  Response frames

The kernel says which process and user is on the other side, ends the connection when that process dies, and wakes the
receiver directly; no thread stands in between, as with ZeroMQ. What is sent in one turn of a loop goes out by one call.
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

log = logging.getLogger(__name__)

CHUNK = 32 << 10
"""Bytes read at once, unless a frame is larger: about a hundred small requests, after which others get their turn."""

LARGE_CHUNK = 1 << 20
"""Bytes read at once of a frame that is larger than CHUNK."""

MAX_UNSENT = 2 * MAX_FRAME
"""Bytes kept for a peer that does not read them; beyond, the connection is closed, and the peer asks again."""

STRANGER_LIMIT = 16 << 10
"""Largest frame of who has not shown the run's key yet: an identity and a Hello."""

STRANGER_TIME = 30.0
"""Seconds in which a new connection must show the key."""

RECONNECT = 0.02
"""A restarted controller is found again within this time, in seconds; pauses double up to RECONNECT_MAX."""

RECONNECT_MAX = 0.5

AT_ONCE = 16
"""Connections read before their answers go out: the first must not wait for the thousandth."""

ACCEPT_PAUSE = 1.0
"""Seconds without new connections after one could not be accepted (no descriptors left)."""

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")


class Stream:
    """One connection. Its owner calls `read` when there is something to read, and `flush` after it has queued frames
    and when there is room again.

    Invariant: memory held for a frame that is arriving never exceeds `limit`, whatever length it claims.
    """

    def __init__(
        self, sock: socket.socket, on_frame: Callable[[memoryview], None], on_end: Callable[[str], None], limit: int
    ) -> None:
        """`on_frame` may keep nothing of the memory that it is shown. `on_end(reason)` is called once."""
        sock.setblocking(False)
        self.fd = sock.fileno()
        self.limit = limit
        self.closed = False
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._partial = bytearray()
        self._need = _LENGTH.size
        self._unsent: list[bytes | memoryview] = []
        self._unsent_bytes = 0

    def read(self) -> None:
        """Take what has arrived (a chunk of it) and hand over the frames that are whole."""
        missing = self._need - len(self._partial)
        try:
            data = self._sock.recv(CHUNK if missing <= CHUNK else min(missing, LARGE_CHUNK))
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError:
            data = b""
        if not data:
            self.end("")
            return
        try:
            self._take(data)
        except BaseException:  # what else has arrived is lost with it, so the other side has to send it again
            self.end("a frame could not be handled")
            raise

    def queue(self, frame: bytes) -> None:
        """Send this with the next `flush`."""
        self._unsent += (_LENGTH.pack(len(frame)), frame)
        self._unsent_bytes += _LENGTH.size + len(frame)
        if self._unsent_bytes > MAX_UNSENT:
            self.end(f"it does not read: {self._unsent_bytes} bytes wait for it")

    def flush(self) -> bool:
        """Send what is queued; whether all of it went out."""
        while self._unsent and not self.closed:
            data = b"".join(self._unsent) if len(self._unsent) > 1 else self._unsent[0]
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except ConnectionError:
                self.end("")
                return True
            self._unsent_bytes -= sent
            if sent == len(data):
                self._unsent.clear()
            else:
                self._unsent = [memoryview(data)[sent:]]
                if not sent:
                    return False
        return True

    def end(self, reason: str) -> None:
        """Close; an empty reason means that the other side has."""
        if not self.closed:
            self.closed = True
            self._unsent.clear()
            self._on_end(reason)
            self._sock.close()

    def _take(self, data: bytes) -> None:
        if self._partial:
            self._partial += data
            if len(self._partial) < self._need:
                return
            whole, self._partial = self._partial, bytearray()
        else:
            whole = data
        view, at, have = memoryview(whole), 0, len(whole)
        self._need = _LENGTH.size
        while have - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(view, at)
            if length > self.limit:
                self.end(f"a frame of {length} bytes, the limit is {self.limit}")
                return
            begin = at + _LENGTH.size
            if have - begin < length:
                self._need = _LENGTH.size + length
                break
            at = begin + length
            self._on_frame(view[begin:at])
            if self.closed:
                return
        if at < have:
            self._partial = bytearray(view[at:])


class StreamLink:
    """The client's end: connects, and connects again whenever the connection is lost."""

    def __init__(
        self, path: str, identity: bytes, *, on_up: Callable[[], None], on_down: Callable[[], None],
        on_frame: Callable[[memoryview], None],
    ) -> None:  # fmt: skip
        self._path = path
        self._identity = identity
        self._on_up, self._on_down, self._on_frame = on_up, on_down, on_frame
        self._loop = asyncio.get_running_loop()
        self._stream: Stream | None = None
        self._pause = RECONNECT
        self._flushing = False
        self._timer: asyncio.Handle | None = self._loop.call_soon(self._connect)

    def send(self, frame: bytes) -> bool:
        """Send at the end of this turn of the loop. Whether there is a connection; what a lost one had is lost."""
        if self._stream is None:
            return False
        self._stream.queue(frame)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return self._stream is not None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._on_down = _nothing
        if self._stream is not None:
            self._stream.flush()
        if self._stream is not None:
            self._stream.end("")
        if self._timer is not None:
            self._timer.cancel()

    def _connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.connect(self._path)
        except OSError:  # nobody there, or (EAGAIN) too many who wait to be accepted
            sock.close()
            self._again()
            return
        self._timer, self._pause = None, RECONNECT
        self._stream = Stream(sock, self._on_frame, self._ended, MAX_FRAME)
        self._loop.add_reader(self._stream.fd, self._stream.read)
        self.send(self._identity)
        self._on_up()

    def _again(self) -> None:
        self._timer = self._loop.call_later(self._pause, self._connect)
        self._pause = min(2 * self._pause, RECONNECT_MAX)

    def _flush(self) -> None:
        self._flushing = False
        if self._stream is not None and not self._stream.flush() and self._stream is not None:
            self._loop.add_writer(self._stream.fd, self._writable, self._stream)

    def _writable(self, stream: Stream) -> None:
        if stream.flush() and not stream.closed:
            self._loop.remove_writer(stream.fd)

    def _ended(self, reason: str) -> None:
        assert self._stream is not None
        self._loop.remove_reader(self._stream.fd)
        self._loop.remove_writer(self._stream.fd)
        self._stream = None
        if reason:
            log.info("a connection to %s ended: %s", self._path, reason)
        self._again()
        self._on_down()


class _Peer:
    """A connection to the controller: a stranger until it is welcomed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.client = ""
        self.stream: Stream | None = None
        self.patience: asyncio.TimerHandle | None = None


class StreamListener:
    """The controller's end: all its connections, on one epoll that the loop watches.

    Invariant: a client has one connection, the last that named its identity; only this user's processes have any.
    """

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
        self._on_end = _nothing
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


def _nothing(*_: object) -> None:
    pass
