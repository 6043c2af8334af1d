"""The Prometheus endpoint: GET /metrics on loopback, with a bearer key.

    exporter = Exporter(run_dir, port=0)
    exporter.update(queue_stats, step_metrics)
    curl -H "Authorization: Bearer $(cat runs/latest/prometheus.key)" http://127.0.0.1:$PORT/metrics

There is no open port without a key: it lies in the run directory, readable by its owner only, and Prometheus takes it
as `authorization: {credentials_file: ...}`. A request needs an allowed Host (a web page that rebinds a name to
127.0.0.1 has none), the method GET, the key, and the path /metrics, checked in this order.

The numbers are snapshots: an update replaces what it speaks of, so labels that are no longer true (a unit that went
away, a partition that was cleared) disappear.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from errno import EADDRINUSE
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from streamrl.errors import UserError
from streamrl.monitor.prometheus_values import Samples, Values, queue_samples, step_samples
from streamrl.monitor.registry import PROMETHEUS
from transfer_queue.net.messages import QueueStats

logger = logging.getLogger(__name__)

KEY_FILE = "prometheus.key"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HOSTS = ("127.0.0.1", "localhost", "[::1]")

REQUEST_SECONDS = 5.0
"""A client that has not sent its whole request within this time is cut off, however it spreads the bytes."""

MAX_CONNECTIONS = 8
"""Further ones are closed at once: nobody can make the trainer's process hold threads."""


class PortInUse(UserError):
    """Another process listens on the port that `monitor.prometheus.port` names."""


class Exporter:
    """Serves `Values` from a daemon thread. `port` 0 picks a free one; `port` and `url` say which. Raises PortInUse.

    On another `host` than loopback the key crosses the network unencrypted: only inside a network you trust.
    """

    def __init__(
        self,
        run_dir: Path | str,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        version: str = "",
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.values = Values(version)
        self._wall = wall
        registry = CollectorRegistry()
        registry.register(self.values)  # type: ignore[arg-type]  # prometheus_client asks for `collect` only
        key = _ensure_key(Path(run_dir) / KEY_FILE)
        try:
            self._server = _Server((host, port), registry, key)
        except OSError as error:
            if error.errno != EADDRINUSE:
                raise UserError(f"monitor.prometheus.host={host} port={port} cannot be opened: {error}") from error
            raise PortInUse(
                f"monitor.prometheus.port={port} is in use on {host}; "
                "set monitor.prometheus.port to another port, or to 0 to have a free one picked"
            ) from error
        self.host, self.port = host, int(self._server.server_address[1])
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="prometheus", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/metrics"

    def update(self, stats: QueueStats | None = None, metrics: Mapping[str, Any] | None = None) -> None:
        """Take over the queue's state and the metrics of one finished step (whose counts are added up)."""
        if stats is not None:
            self.values.replace(queue_samples(stats))
        if metrics is not None:
            gauges, increments = step_samples(metrics)
            self.values.replace(gauges)
            for name, samples in increments.items():
                for key, amount in samples.items():
                    self.values.add(name, amount, **dict(zip(PROMETHEUS[name].labels, key, strict=True)))
        self.values.set("streamrl_metrics_last_update_timestamp_seconds", self._wall())

    def set_weight_versions(self, trainer: int, engines: Mapping[str, int]) -> None:
        """The trainer's version and that of each engine in service."""
        samples: Samples = {("rollout", engine): version for engine, version in engines.items()}
        self.values.replace({"streamrl_weight_version": {("trainer", ""): trainer} | samples})

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # a connection wakes the thread
            socket.create_connection((self.host, self.port), timeout=1.0).close()
        self._thread.join(REQUEST_SECONDS)
        self._server.server_close()

    def _serve(self) -> None:
        while not self._closing:
            self._server.handle_request()


def _ensure_key(path: Path) -> bytes:
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


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry, key: bytes) -> None:
        self.registry, self.key = registry, key
        self.hosts = (*HOSTS, address[0])
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, _Handler)

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
        logger.debug("a scrape by %s failed: %r", client_address, sys.exception())


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


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "streamrl", ""
    timeout: float = REQUEST_SECONDS

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
            self._answer(refusal, f"{refusal.phrase}\n".encode())
            return False
        return True

    def _refusal(self) -> HTTPStatus | None:
        host = self.headers.get("Host", "")
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
        if name not in self.server.hosts or (port and not port.isdigit()):
            return HTTPStatus.BAD_REQUEST
        if self.command != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, b"Bearer " + self.server.key):
            return HTTPStatus.UNAUTHORIZED
        return None if self.path == "/metrics" else HTTPStatus.NOT_FOUND

    def do_GET(self) -> None:
        self._answer(HTTPStatus.OK, generate_latest(self.server.registry))

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        elif status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.send_header("Content-Type", CONTENT_TYPE if status is HTTPStatus.OK else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s: " + format, self.address_string(), *args)
