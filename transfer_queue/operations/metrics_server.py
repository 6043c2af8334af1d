"""The HTTP endpoint of the metrics: GET /metrics on loopback, for who has its key.

There is no open port without a key, on loopback neither, where every user of the machine can connect. The key is made
anew at each start, may read metrics and nothing else, and lies in a file of mode 0600, which Prometheus reads at each
scrape (`authorization: credentials_file`). A request must name this machine as its Host (a web page that rebinds its
name to 127.0.0.1 does not), be a GET, bring the key, and ask for /metrics: this is looked at in this order.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any

from transfer_queue.errors import Invalid, QueueError
from transfer_queue.storage.unit_files import replace_file

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
HOSTS = (HOST, "localhost")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REQUEST_SECONDS = 5.0
"""A connection is cut off so long after it came, whatever it has sent until then."""

MAX_CONNECTIONS = 8
"""Further ones are closed at once: nobody can make this process hold threads."""


class MetricsServer:
    """Serves what `text` gives at http://127.0.0.1:PORT/metrics until `close`, from threads of its own."""

    def __init__(self, text: Callable[[], bytes], port: int, key_file: Path) -> None:
        """Port 0: a free one. The key is written to `key_file`, IP:PORT beside it (`.endpoint`). Raises Invalid for a
        port that cannot be had."""
        key = secrets.token_urlsafe(32)
        try:
            self._server = _Server((HOST, port), text, key.encode())
        except OSError as error:
            raise Invalid(f"metrics.port={port}: {error.strerror}; give another one, or 0 for a free one") from None
        self.endpoint = f"{HOST}:{self._server.server_port}"
        self.key_file, self._endpoint_file = key_file, key_file.with_suffix(".endpoint")
        try:
            replace_file(key_file, key + "\n")
            replace_file(self._endpoint_file, self.endpoint + "\n")
        except BaseException:
            self._server.server_close()
            raise
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for file in (self.key_file, self._endpoint_file):
            file.unlink(missing_ok=True)


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], text: Callable[[], bytes], key: bytes) -> None:
        self.text, self.key = text, key
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        cut = threading.Timer(REQUEST_SECONDS, _shut_reading, [request])
        cut.daemon = True
        cut.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            cut.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape by %s failed", client_address, exc_info=True)


def _shut_reading(connection: socket.socket) -> None:
    """Who is still sending is not listened to any more; an answer under way goes on."""
    try:
        connection.shutdown(socket.SHUT_RD)
    except OSError:  # closed meanwhile
        return


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "transfer_queue", ""
    timeout: float = REQUEST_SECONDS

    def parse_request(self) -> bool:
        """Everything that must hold before any method is looked up."""
        if not super().parse_request():
            return False
        refusal = self._refusal()
        if refusal is not None:
            self._answer(refusal, f"{refusal.phrase}\n".encode())
        return refusal is None

    def _refusal(self) -> HTTPStatus | None:
        name, _, port = self.headers.get("Host", "").partition(":")
        if name not in HOSTS or (port and not port.isdigit()):
            return HTTPStatus.BAD_REQUEST
        if self.command != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, b"Bearer " + self.server.key):
            return HTTPStatus.UNAUTHORIZED
        return None if self.path == "/metrics" else HTTPStatus.NOT_FOUND

    def do_GET(self) -> None:
        try:
            self._answer(HTTPStatus.OK, self.server.text())
        except QueueError as error:  # it is down, or being started again
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode())

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
        log.debug("%s: " + format, self.address_string(), *args)
