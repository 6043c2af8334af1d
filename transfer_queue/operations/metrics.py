"""Prometheus metrics of a queue, served on loopback by the process that started it; asked for at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from transfer_queue.clients.sync_client import SyncQueueClient
from transfer_queue.errors import Invalid
from transfer_queue.keys import UNNAMED
from transfer_queue.net.messages import QueueStats


class MetricsServer:
    """Serves http://127.0.0.1:PORT/metrics until `close`."""

    def __init__(self, client: SyncQueueClient, port: int) -> None:
        """Port 0: a free one. Raises Invalid for one that is taken."""
        registry = CollectorRegistry()
        registry.register(_QueueCollector(client))
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        except OSError as error:
            raise Invalid(f"metrics.port={port}: {error.strerror}; give another one, or 0 for a free one") from None
        self.endpoint = f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _QueueCollector(Collector):
    def __init__(self, client: SyncQueueClient) -> None:
        self._client = client

    def describe(self) -> list[Metric]:
        """Nothing to say before the first scrape; it also keeps `register` from asking the queue."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from families(self._client.stats())


def families(stats: QueueStats) -> Iterator[Metric]:
    """The statistics as metric families, under TransferQueue's names where it has one for the same thing."""
    shown = {name: one for name, one in stats.partitions.items() if not name.startswith(UNNAMED)}
    yield GaugeMetricFamily("tq_partitions_total", "Partitions", len(shown))
    yield GaugeMetricFamily("tq_clients", "Connected clients", stats.clients)
    rows = GaugeMetricFamily("tq_partition_samples_total", "Rows", labels=["partition_id"])
    nbytes = GaugeMetricFamily("tq_partition_bytes", "Live bytes", labels=["partition_id"])
    groups = GaugeMetricFamily("tq_partition_groups", "Prompt groups by state", labels=["partition_id", "state"])
    for name, one in shown.items():
        rows.add_metric([name], one.rows)
        nbytes.add_metric([name], one.nbytes)
        for state, count in one.depth.items():
            groups.add_metric([name, state], count)
    used = GaugeMetricFamily("tq_storage_used_bytes", "Bytes of segments in memory", labels=["storage_unit_id"])
    budget = GaugeMetricFamily("tq_storage_budget_bytes", "Bytes of segments at most", labels=["storage_unit_id"])
    spilled = GaugeMetricFamily("tq_storage_spilled_bytes", "Bytes of segments on disk", labels=["storage_unit_id"])
    for unit in stats.units:
        used.add_metric([str(unit.unit)], unit.used)
        budget.add_metric([str(unit.unit)], unit.budget)
        spilled.add_metric([str(unit.unit)], unit.spilled)
    yield from (rows, nbytes, groups, used, budget, spilled)
