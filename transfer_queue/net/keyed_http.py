"""HTTP of one process on loopback, with a bearer key: what the metrics and the servers' interface have in common.

There is no open port without a key: it lies in a file readable by its owner only. A request needs an allowed Host (a
web page that rebinds a name to 127.0.0.1 has none), a known method, the key, and a known path, checked in this order.
A client can hold neither threads nor memory: few connections, a deadline for the whole request, limits for its headers
and its body. Nor can one without the key keep out those who have it: these have places of their own, and a newcomer
takes that of the oldest connection that has shown none.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import io
import logging
import os
import secrets
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

HOSTS = ("127.0.0.1", "localhost", "[::1]")

REQUEST_SECONDS = 5.0
"""A client that has not sent its whole request within this time is cut off, however it spreads the bytes."""

KEY_SECONDS = 2.0
"""Of these, until its headers have come, with the key."""

MAX_CONNECTIONS = 8
"""With the key. Further ones are told to come back: nobody can make the process hold threads."""

MAX_STRANGERS = 32
"""Connections that have not shown the key yet: so many others must come while one shows it to keep it out."""

MAX_HEADERS = MAX_BODY = 1 << 16


def ensure_key(path: Path) -> bytes:
    """The key in `path`, made if there is none; a file that others could read or write is replaced."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # there is none, or it is a link
        fd = -1
    if fd >= 0:
        with os.fdopen(fd, "rb") as file:
            stat = os.fstat(file.fileno())
            key = file.read(256).strip()
            if stat.st_uid == os.getuid() and not stat.st_mode & 0o077 and len(key) >= 32:
                return key
        logger.warning("%s was readable by others or damaged; a new key replaces it", path)
    key = secrets.token_urlsafe(32).encode()
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(key + b"\n")
    fresh.replace(path)
    return key


class KeyedServer(ThreadingHTTPServer):
    """Raises OSError for an address that cannot be had."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], key: bytes, handler: type[KeyedHandler]) -> None:
        self.key = key
        self.hosts = (*HOSTS, address[0])
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._known: set[socket.socket] = set()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._strangers[request] = None
            if len(self._strangers) > MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and goes
        super().process_request(request, client_address)

    def admit(self, request: socket.socket) -> bool:
        """It has shown the key: whether there is a place for it, and nobody has taken the one it had."""
        with self._lock:
            if request not in self._strangers or len(self._known) >= MAX_CONNECTIONS:
                return False
            del self._strangers[request]
            self._known.add(request)
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._strangers.pop(request, None)
            self._known.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request of %s failed: %r", client_address, sys.exception())


class _ReadUntil(io.RawIOBase):
    """A socket to read `most` bytes from until `deadline`. A time-out of the socket alone would begin anew with every
    byte."""

    def __init__(self, connection: socket.socket, deadline: float, most: int) -> None:
        self.deadline, self.most = deadline, most
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises TimeoutError, HTTPException."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request was not whole in time")
        if self.most <= 0:
            raise http.client.HTTPException("the request is too long")
        self._connection.settimeout(left)
        count = self._connection.recv_into(buffer)
        self.most -= count
        return count


class KeyedHandler(BaseHTTPRequestHandler):
    """A subclass says which methods and paths there are, and has a `do_...` for each method."""

    server: KeyedServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "streamrl", ""
    default_request_version = "HTTP/1.0"  # of a request whose own is not known: its answer has headers
    timeout: float = REQUEST_SECONDS
    methods: tuple[str, ...] = ("GET",)

    def knows(self, path: str) -> bool:
        raise NotImplementedError

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._reading = _ReadUntil(self.connection, time.monotonic() + KEY_SECONDS, MAX_HEADERS)
        self.rfile = io.BufferedReader(self._reading)

    def parse_request(self) -> bool:
        """Everything that must hold before any method is looked up."""
        if not super().parse_request():
            return False
        refusal = self._refusal()
        if refusal is None and not self.server.admit(self.connection):
            refusal = HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_CONNECTIONS} requests are at work; come back later"
        if refusal is not None:
            self.refuse(*refusal)
            return False
        self._reading.deadline += self.timeout - KEY_SECONDS
        self._reading.most += MAX_BODY
        return True

    def _refusal(self) -> tuple[HTTPStatus, str] | None:
        host = self.headers.get("Host", "")
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
        if name not in self.server.hosts or (port and not port.isdigit()):
            return HTTPStatus.BAD_REQUEST, "the Host is none of this server's"
        if self.command not in self.methods:
            return HTTPStatus.METHOD_NOT_ALLOWED, f"the methods are {', '.join(self.methods)}"
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, b"Bearer " + self.server.key):
            return HTTPStatus.UNAUTHORIZED, "the key is missing, or another server's"
        if not self.knows(self.path):
            return HTTPStatus.NOT_FOUND, "there is no such place"
        if "Transfer-Encoding" in self.headers:
            return HTTPStatus.LENGTH_REQUIRED, "a body is read by its Content-Length alone, and not in chunks"
        return None

    def body(self) -> bytes:
        """Raises ValueError for one that is too long, has no length, or is shorter than that; TimeoutError."""
        lengths = self.headers.get_all("Content-Length", ["0"])
        if len(lengths) != 1 or not lengths[0].isdecimal() or int(lengths[0]) > MAX_BODY:
            told = ", ".join(lengths)[:100]
            raise ValueError(f"a body of at most {MAX_BODY} bytes, with one Content-Length, is read; not {told!r}")
        read = self.rfile.read(int(lengths[0]))
        if len(read) != int(lengths[0]):
            raise ValueError(f"the body has {len(read)} bytes, and its Content-Length is {lengths[0]}")
        return read

    def refuse(self, status: HTTPStatus, why: str) -> None:
        """In the form of the server's other answers."""
        self.answer(status, f"{why}\n".encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library finds wrong, which it would tell as a page of HTML."""
        self.close_connection = True
        self.refuse(HTTPStatus(code), HTTPStatus(code).phrase)

    def answer(self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.connection.settimeout(self.timeout)  # not what was left for reading
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        elif status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", ", ".join(self.methods))
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s: " + format, self.address_string(), *args)
