"""The HTTP endpoint of the metrics: GET /metrics on loopback, for who has its key (transfer_queue/net/keyed_http.py).

The key is made anew at each start, may read metrics and nothing else, and lies in a file of mode 0600, which Prometheus
reads at each scrape (`authorization: credentials_file`).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from transfer_queue.errors import Invalid, QueueError
from transfer_queue.net.keyed_http import KeyedHandler, KeyedServer
from transfer_queue.storage.unit_files import replace_file

HOST = "127.0.0.1"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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


class _Server(KeyedServer):
    def __init__(self, address: tuple[str, int], text: Callable[[], bytes], key: bytes) -> None:
        self.text = text
        super().__init__(address, key, _Handler)


class _Handler(KeyedHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version = "transfer_queue"

    def knows(self, path: str) -> bool:
        return path == "/metrics"

    def do_GET(self) -> None:
        try:
            self.answer(HTTPStatus.OK, self.server.text(), CONTENT_TYPE)
        except QueueError as error:  # it is down, or being started again
            self.answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode())
