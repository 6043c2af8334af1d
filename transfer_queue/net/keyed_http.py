"""HTTP of one process on loopback, with a bearer key: what the metrics and the servers' interface have in common.

There is no open port without a key: it lies in a file readable by its owner only. A request needs an allowed Host (a
web page that rebinds a name to 127.0.0.1 has none), a known method, the key, and a known path, checked in this order.
A client can hold neither threads nor memory: few connections, a deadline for the whole request, a limit for its body.
"""

from __future__ import annotations

import hmac
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

MAX_CONNECTIONS = 8
"""Further ones are closed at once: nobody can make the process hold threads."""

MAX_BODY = 1 << 16


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
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request of %s failed: %r", client_address, sys.exception())


class _ReadUntil(io.RawIOBase):
    """A socket to read from until `deadline`. A time-out of the socket alone would begin anew with every byte."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises TimeoutError."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request was not whole in time")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class KeyedHandler(BaseHTTPRequestHandler):
    """A subclass says which methods and paths there are, and has a `do_...` for each method."""

    server: KeyedServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "streamrl", ""
    timeout: float = REQUEST_SECONDS
    methods: tuple[str, ...] = ("GET",)

    def knows(self, path: str) -> bool:
        raise NotImplementedError

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_ReadUntil(self.connection, time.monotonic() + self.timeout))

    def parse_request(self) -> bool:
        """Everything that must hold before any method is looked up."""
        if not super().parse_request():
            return False
        refusal = self._refusal()
        if refusal is not None:
            self.answer(refusal, f"{refusal.phrase}\n".encode())
            return False
        return True

    def _refusal(self) -> HTTPStatus | None:
        host = self.headers.get("Host", "")
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
        if name not in self.server.hosts or (port and not port.isdigit()):
            return HTTPStatus.BAD_REQUEST
        if self.command not in self.methods:
            return HTTPStatus.METHOD_NOT_ALLOWED
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, b"Bearer " + self.server.key):
            return HTTPStatus.UNAUTHORIZED
        return None if self.knows(self.path) else HTTPStatus.NOT_FOUND

    def body(self) -> bytes:
        """Raises ValueError for one that is too long, or has no length."""
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > MAX_BODY:
            raise ValueError(f"a body of at most {MAX_BODY} bytes, with a Content-Length, is read; not {length!r}")
        return self.rfile.read(int(length))

    def answer(self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
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
