"""Frames over a Unix stream socket: how processes of one node talk to the controller.

    frame       length (u32, little-endian), then so many bytes; one after the other, in both directions
    client      its identity as the first frame, then Request frames
    controller  Response frames

The kernel says which process and user is on the other side, ends the connection when that process dies, and wakes the
receiver directly; no thread stands in between, as with ZeroMQ. What is sent in one turn of a loop goes out by one call.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable

from transfer_queue.net.codec import MAX_FRAME

log = logging.getLogger(__name__)

CHUNK = 32 << 10
"""Bytes read at once, unless a frame is larger: about a hundred small requests, after which others get their turn."""

LARGE_CHUNK = 1 << 20
"""Bytes read at once of a frame that is larger than CHUNK."""

MAX_UNSENT = 2 * MAX_FRAME
"""Bytes kept for a peer that does not read them; beyond, the connection is closed, and the peer asks again."""

RECONNECT = 0.02
"""A restarted controller is found again within this time, in seconds; pauses double up to RECONNECT_MAX."""

RECONNECT_MAX = 0.5

_LENGTH = struct.Struct("<I")


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

    def send(self, frame: bytes, *, now: bool = False) -> bool:
        """Send at the end of this turn of the loop, with what else is sent in it, or now. Whether there is a
        connection; what a lost one had is lost."""
        if self._stream is None:
            return False
        self._stream.queue(frame)
        if now:
            self._flush()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return self._stream is not None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._on_down = lambda: None
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
