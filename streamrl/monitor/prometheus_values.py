"""The numbers behind the Prometheus endpoint: what QueueStats and step metrics say about the metrics of registry.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from streamrl.monitor.emit import Load
from streamrl.monitor.registry import PROMETHEUS, PROMETHEUS_TABLE, by_reason_class, expand
from transfer_queue.net.messages import QueueStats

Samples = dict[tuple[str, ...], float]
"""Value by label values, in the order of the table's labels."""


class Values:
    """The current number of every metric of the table, collected into Prometheus' families on a scrape. Thread-safe."""

    def __init__(self, version: str = "") -> None:
        self._lock = threading.Lock()
        self._samples: dict[str, Samples] = {}
        self.live: Callable[[], Mapping[str, Samples]] = dict
        """What is asked for at each scrape, also while no step ends."""
        self.set("streamrl_build_info", 1.0, version=version or "unknown")

    def set(self, name: str, value: float, **labels: str) -> None:
        """One value; others of the same metric stay."""
        key = self._key(name, labels)
        with self._lock:
            self._samples.setdefault(name, {})[key] = float(value)

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Increase a counter."""
        key = self._key(name, labels)
        with self._lock:
            samples = self._samples.setdefault(name, {})
            samples[key] = samples.get(key, 0.0) + float(amount)

    def replace(self, snapshot: Mapping[str, Samples]) -> None:
        """All values of these metrics at once: what is not in the snapshot is gone."""
        for name, samples in snapshot.items():
            wrong = [key for key in samples if len(key) != len(PROMETHEUS[name].labels)]
            if wrong:
                raise ValueError(f"{name} has the labels {PROMETHEUS[name].labels}, got the values {wrong[0]}")
        with self._lock:
            self._samples.update({name: dict(samples) for name, samples in snapshot.items()})

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        self.replace(self.live())
        with self._lock:
            samples = {name: dict(values) for name, values in self._samples.items()}
        for metric in PROMETHEUS_TABLE:
            if metric.name in samples:
                family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                collected = family(metric.name, metric.help, labels=metric.labels)
                for key, value in samples[metric.name].items():
                    collected.add_metric(key, value)
                yield collected

    @staticmethod
    def _key(name: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        metric = PROMETHEUS.get(name)
        if metric is None or set(labels) != set(metric.labels):
            expected = metric.labels if metric else "no such metric"
            raise ValueError(f"{name} with the labels {sorted(labels)}; monitor/registry.py has: {expected}")
        return tuple(str(labels[label]) for label in metric.labels)


TERMINAL = ("trained", "dropped", "dead")


def queue_samples(stats: QueueStats) -> dict[str, Samples]:
    """The queue's part of the table, complete."""
    parts = stats.partitions.items()
    units = [((str(u.unit), "memory"), u) for u in stats.units if u.alive]
    return {
        "streamrl_queue_groups": {
            (name, state): count for name, p in parts for state, count in p.depth.items() if state not in TERMINAL
        },
        "streamrl_queue_rows": {(name,): p.rows for name, p in parts},
        "streamrl_queue_partition_bytes": {(name,): p.nbytes for name, p in parts},
        "streamrl_queue_oldest_age_seconds": {
            (name, state): age for name, p in parts for state, age in p.oldest_age.items()
        },
        "streamrl_credits_available": {
            (name,): max(0, p.max_groups - sum(n for state, n in p.depth.items() if state not in TERMINAL))
            for name, p in parts
            if p.max_groups
        },
        "streamrl_groups_trained_total": {(name,): p.depth.get("trained", 0) for name, p in parts},
        "streamrl_groups_dropped_total": {
            (name, reason): count for name, p in parts for reason, count in by_reason_class(p.dropped).items()
        },
        "streamrl_groups_redelivered_total": {(name,): p.redelivered for name, p in parts},
        "streamrl_groups_dead_total": {(name,): p.depth.get("dead", len(p.dead)) for name, p in parts},
        "streamrl_queue_bytes": {key: u.used for key, u in units},
        "streamrl_queue_budget_bytes": {key: u.budget for key, u in units},
        "streamrl_unit_up": {(str(u.unit),): float(u.alive) for u in stats.units},
        "streamrl_queue_clients": {(): stats.clients},
    }


OF_ENGINE = {
    "streamrl_engine_slots": "slots",
    "streamrl_engine_asleep": "asleep",
    "streamrl_engine_cache_usage_ratio": "cache_usage",
    "streamrl_engine_tokens_total": "tokens_generated",
    "streamrl_engine_busy_seconds_total": "busy_seconds",
    "streamrl_engine_first_tokens_total": "first_tokens",
    "streamrl_engine_queue_seconds_total": "queue_seconds",
    "streamrl_engine_first_token_seconds_total": "first_token_seconds",
    "streamrl_engine_preemptions_total": "preemptions",
    "streamrl_weight_age_seconds": "weights_seconds",
}
"""Metric -> the field of a server's load that it shows."""
OF_CACHE = {
    "streamrl_engine_prompt_tokens_total": "prompt_tokens",
    "streamrl_engine_cached_tokens_total": "cached_tokens",
}
"""The same, of servers that tell of their prefix cache."""


def engine_samples(loads: Mapping[str, Load]) -> dict[str, Samples]:
    """The servers' part of the table, complete: one that is gone leaves it."""
    found: dict[str, Samples] = {
        name: {(server,): float(getattr(load, field)) for server, load in loads.items()}
        for name, field in OF_ENGINE.items()
    }
    for name, field in OF_CACHE.items():
        found[name] = {(s,): float(getattr(load, field)) for s, load in loads.items() if load.prompt_tokens}
    found["streamrl_engine_requests"] = {
        key: count for s, load in loads.items()
        for key, count in (((s, "running"), float(load.running)), ((s, "waiting"), float(load.waiting)))
    }  # fmt: skip
    return found


SERVICE = ("serving", "asleep", "draining", "out")


def service_samples(service: Mapping[str, tuple[str, int]]) -> dict[str, Samples]:
    """Of each server's status, and how often it was out; nothing where nobody tells."""
    if not service:
        return {}
    states = [status for status, _ in service.values()]
    return {
        "streamrl_rollout_servers": {(state,): float(states.count(state)) for state in SERVICE},
        "streamrl_rollout_outages_total": {(server,): float(outages) for server, (_, outages) in service.items()},
    }


def step_samples(metrics: Mapping[str, Any]) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """What the metrics of one step set (gauges), and by how much they increase counters."""
    gauges: dict[str, Samples] = {}
    increments: dict[str, Samples] = {}
    for metric in PROMETHEUS_TABLE:
        target = increments if metric.kind == "counter" else gauges
        for name in expand(metric.source) if metric.source else ():
            if name in metrics:
                key = (name.rsplit("/", 1)[1],) if metric.labels else ()
                target.setdefault(metric.name, {})[key] = float(metrics[name])
    busy = {("train",): "overlap/train_s", ("generate",): "overlap/generation_busy_s"}
    waits = {("train", name.removeprefix("lost_s/")): name for name in metrics if name.startswith("lost_s/")}
    waits |= {("generate", "sync"): "overlap/generation_stalled_s", ("generate", "idle"): "overlap/generation_idle_s"}
    for total, sources in (("streamrl_stage_busy_seconds_total", busy), ("streamrl_stage_wait_seconds_total", waits)):
        increments[total] = {key: float(metrics[name]) for key, name in sources.items() if name in metrics}
    return gauges, increments
