"""The Prometheus endpoint: GET /metrics on loopback, with a bearer key.

    exporter = Exporter(run_dir, port=0)
    exporter.update(queue_stats, step_metrics)
    curl -H "Authorization: Bearer $(cat runs/latest/prometheus.key)" http://127.0.0.1:$PORT/metrics

The key lies in the run directory (keyed_http.py says who gets an answer); Prometheus takes it as
`authorization: {credentials_file: ...}`.

The numbers are snapshots: an update replaces what it speaks of, so labels that are no longer true (a unit that went
away, a partition that was cleared) disappear.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from errno import EADDRINUSE
from http import HTTPStatus
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from streamrl.errors import UserError
from streamrl.monitor.emit import Load
from streamrl.monitor.prometheus_values import (
    Samples,
    Values,
    engine_samples,
    queue_samples,
    service_samples,
    step_samples,
)
from streamrl.monitor.registry import PROMETHEUS
from transfer_queue.net.keyed_http import REQUEST_SECONDS, KeyedHandler, KeyedServer, ensure_key
from transfer_queue.net.messages import QueueStats

KEY_FILE = "prometheus.key"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
        key = ensure_key(Path(run_dir) / KEY_FILE)
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

    def follow_service(self, service: Callable[[], Mapping[str, tuple[str, int]]]) -> None:
        """By server its status, and how often it was out of service; asked at each scrape."""
        self.values.live = lambda: service_samples(service())

    def set_engines(self, loads: Mapping[str, Load]) -> None:
        """What each engine does, as it was last looked at."""
        self.values.replace(engine_samples(loads))

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # a connection wakes the thread
            socket.create_connection((self.host, self.port), timeout=1.0).close()
        self._thread.join(REQUEST_SECONDS)
        self._server.server_close()

    def _serve(self) -> None:
        while not self._closing:
            self._server.handle_request()


class _Server(KeyedServer):
    def __init__(self, address: tuple[str, int], registry: CollectorRegistry, key: bytes) -> None:
        self.registry = registry
        super().__init__(address, key, _Handler)


class _Handler(KeyedHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def knows(self, path: str) -> bool:
        return path == "/metrics"

    def do_GET(self) -> None:
        self.answer(HTTPStatus.OK, generate_latest(self.server.registry), CONTENT_TYPE)
