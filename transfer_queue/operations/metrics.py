"""A queue's statistics as Prometheus metrics, asked for at each scrape. docs/transfer_queue.md has them in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from transfer_queue.clients.sync_client import SyncQueueClient
from transfer_queue.controller.account import BOUNDS
from transfer_queue.keys import UNNAMED
from transfer_queue.net.messages import PartitionStats, QueueStats, RequestStats, UnitStats
from transfer_queue.operations.metrics_server import MetricsServer

KEY_FILE = "metrics.key"

Restarts = Callable[[], Mapping[str, int]]
"""How often each process was started again, by its name."""


def serve_metrics(
    client: SyncQueueClient, port: int, directory: str | Path, restarts: Restarts | None = None
) -> MetricsServer:
    """Serve the metrics of the client's queue, with the key in `directory`. Raises Invalid for a port that is taken."""
    registry = CollectorRegistry()
    registry.register(_QueueCollector(client, restarts))
    return MetricsServer(lambda: generate_latest(registry), port, Path(directory, KEY_FILE))


class _QueueCollector(Collector):
    def __init__(self, client: SyncQueueClient, restarts: Restarts | None) -> None:
        self._client, self._restarts = client, restarts

    def describe(self) -> list[Metric]:
        """Nothing to say before the first scrape; it also keeps `register` from asking the queue."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from families(self._client.stats(), self._restarts() if self._restarts is not None else {})


def families(stats: QueueStats, restarts: Mapping[str, int] | None = None) -> Iterator[Metric]:
    """The statistics as metric families. Partitions without a name, which serve a load, are left out."""
    shown = {name: one for name, one in stats.partitions.items() if not name.startswith(UNNAMED)}
    yield GaugeMetricFamily("tq_partitions", "Partitions", len(shown))
    yield GaugeMetricFamily("tq_clients", "Connected clients, this one included", stats.clients)
    yield GaugeMetricFamily("tq_controller_epoch", "Lives of the controller on its directory", stats.epoch)
    yield from _partitions(shown)
    yield from _units(stats.units)
    yield from _requests(stats.requests)
    if restarts:
        again = CounterMetricFamily("tq_process_restarts", "Processes that were started again", labels=["process"])
        for name, count in restarts.items():
            again.add_metric([name], count)
        yield again


def _partitions(partitions: dict[str, PartitionStats]) -> Iterator[Metric]:
    by, by_state = ["partition"], ["partition", "state"]
    rows = GaugeMetricFamily("tq_partition_rows", "Rows", labels=by)
    nbytes = GaugeMetricFamily("tq_partition_bytes", "Live bytes", labels=by)
    credit = GaugeMetricFamily("tq_partition_max_groups", "Groups that may be on their way; 0: no bound", labels=by)
    groups = GaugeMetricFamily("tq_partition_groups", "Groups by state; ended ones since the start", labels=by_state)
    ages = GaugeMetricFamily("tq_partition_oldest_age_seconds", "Time of the oldest group in a state", labels=by_state)
    dropped = CounterMetricFamily("tq_partition_dropped", "Groups dropped, by reason", labels=["partition", "reason"])
    again = CounterMetricFamily("tq_partition_redelivered", "Groups that were issued again", labels=by)
    for name, one in partitions.items():
        rows.add_metric([name], one.rows)
        nbytes.add_metric([name], one.nbytes)
        credit.add_metric([name], one.max_groups)
        again.add_metric([name], one.redelivered)
        for family, values in ((groups, one.depth), (ages, one.oldest_age), (dropped, one.dropped)):
            for label, value in values.items():
                family.add_metric([name, label], value)
    yield from (rows, nbytes, credit, groups, ages, dropped, again)


def _units(units: list[UnitStats]) -> Iterator[Metric]:
    shown = {
        "tq_storage_unit_up": ("Whether the unit serves", lambda unit: unit.alive),
        "tq_storage_used_bytes": ("Bytes of segments in memory", lambda unit: unit.used),
        "tq_storage_budget_bytes": ("Bytes of segments in memory at most", lambda unit: unit.budget),
        "tq_storage_spilled_bytes": ("Bytes of segments on disk", lambda unit: unit.spilled),
        "tq_storage_spill_budget_bytes": ("Bytes of segments on disk at most", lambda unit: unit.spill_budget),
        "tq_storage_segments": ("Segments", lambda unit: unit.segments),
    }
    for name, (what, value) in shown.items():
        family = GaugeMetricFamily(name, what, labels=["unit"])
        for unit in units:
            family.add_metric([str(unit.unit)], value(unit))
        yield family


def _requests(requests: dict[str, RequestStats]) -> Iterator[Metric]:
    """Since the life of the controller began: a restart sets them back, as Prometheus expects of counters."""
    times = HistogramMetricFamily(
        "tq_request_service_seconds", "Time for which a request kept the controller busy", labels=["kind"]
    )
    refused = CounterMetricFamily("tq_requests_refused", "Requests answered by an error", labels=["kind", "code"])
    for kind, one in requests.items():
        bounds = [*map(str, BOUNDS), "+Inf"]
        if any(one.counts):
            times.add_metric([kind], list(zip(bounds, accumulate(one.counts), strict=True)), one.seconds)
        for code, count in one.refused.items():
            refused.add_metric([kind, code], count)
    yield from (times, refused)
