"""The Prometheus endpoint: real requests against it, read by Prometheus' own parser."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent_loop.llm.protocol import ServerLoad
from streamrl.monitor.prometheus import Exporter, PortInUse
from streamrl.monitor.prometheus_values import Values
from transfer_queue.net.keyed_http import MAX_STRANGERS
from transfer_queue.net.messages import PartitionStats, QueueStats, UnitStats


def queue_stats(partitions: tuple[str, ...] = ("train", "val"), units: tuple[int, ...] = (0, 1)) -> QueueStats:
    part = PartitionStats(
        depth={"pending": 3, "generating": 5, "ready": 2, "training": 4, "trained": 40, "dropped": 3, "dead": 1},
        rows=96,
        nbytes=4096,
        next_order=58,
        dropped={"stale": 1, "failed: ValueError": 1, "failed: OSError": 1},
        redelivered=2,
        dead={"e0p1": "poison"},
        oldest_age={"ready": 1.5},
        max_groups=32,
    )
    return QueueStats(
        epoch=1,
        partitions=dict.fromkeys(partitions, part),
        clients=6,
        units=[UnitStats(unit=unit, alive=True, used=1 << 20, budget=1 << 28, segments=1) for unit in units],
    )


STEP = {
    "training/global_step": 7,
    "critic/score/mean": 0.25,
    "perf/total_num_tokens": 1000,
    "rows/trained": 128,
    "training/off_policy/trajectory_staleness/mean": 0.5,
    "training/off_policy/trajectory_staleness/max": 2,
    "overlap/efficiency": 0.9,
    "overlap/sync_s": 0.1,
    "overlap/train_s": 0.7,
    "overlap/generation_busy_s": 0.8,
    "overlap/generation_idle_s": 0.1,
    "lost_s/wait_data": 0.2,
}


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Exporter]:
    exporter = Exporter(tmp_path, version="1.2.3", wall=lambda: 1234.0)
    yield exporter
    exporter.close()


@pytest.fixture
def key(exporter: Exporter, tmp_path: Path) -> str:
    return (tmp_path / "prometheus.key").read_text().strip()


def request(
    exporter: Exporter, key: str | None = None, *, method: str = "GET", path: str = "/metrics", host: str | None = None
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=5)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if host is not None:
        headers["Host"] = host
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def scrape(exporter: Exporter, key: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    status, text = request(exporter, key)
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_depth_of_the_queue_and_the_last_step_are_served(exporter: Exporter, key: str) -> None:
    exporter.update(queue_stats(), STEP)
    exporter.update(metrics=STEP)
    exporter.set_weight_versions(7, {"s0": 6, "s1": 7})
    found = scrape(exporter, key)
    assert found["streamrl_queue_groups", (("partition", "train"), ("state", "ready"))] == 2
    assert ("streamrl_queue_groups", (("partition", "train"), ("state", "trained"))) not in found
    assert found["streamrl_groups_trained_total", (("partition", "train"),)] == 40
    assert found["streamrl_groups_dropped_total", (("partition", "val"), ("reason", "failed"))] == 2
    assert found["streamrl_credits_available", (("partition", "train"),)] == 18
    assert found["streamrl_queue_bytes", (("tier", "memory"), ("unit", "1"))] == 1 << 20
    assert found["streamrl_train_step", ()] == 7
    assert found["streamrl_train_tokens_total", ()] == 2000
    assert found["streamrl_staleness_versions", (("stat", "max"),)] == 2
    assert found["streamrl_stage_busy_seconds_total", (("stage", "train"),)] == pytest.approx(1.4)
    waited = found["streamrl_stage_wait_seconds_total", (("cause", "wait_data"), ("stage", "train"))]
    assert waited == pytest.approx(0.4)
    assert found["streamrl_weight_version", (("engine", "s0"), ("role", "rollout"))] == 6
    assert found["streamrl_metrics_last_update_timestamp_seconds", ()] == 1234.0
    assert found["streamrl_build_info", (("version", "1.2.3"),)] == 1


def test_labels_that_are_no_longer_true_disappear(exporter: Exporter, key: str) -> None:
    exporter.update(queue_stats())
    exporter.set_weight_versions(1, {"s0": 1, "s1": 1})
    exporter.update(queue_stats(partitions=("train",), units=(1,)))
    exporter.set_weight_versions(2, {"s1": 2})
    labels = [dict(labels) for _, labels in scrape(exporter, key)]
    assert not [given for given in labels if given.get("partition") == "val"]
    assert {given["unit"] for given in labels if "unit" in given} == {"1"}
    assert {given["engine"] for given in labels if "engine" in given} == {"", "s1"}


@pytest.mark.parametrize("given", [None, "", "wrong", "schlüssel"])
def test_without_the_key_there_is_nothing_to_see(exporter: Exporter, given: str | None) -> None:
    status, text = request(exporter, given)
    assert (status, text) == (401, "the key is missing, or another server's\n")
    assert request(exporter, given, path="/")[0] == 401


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_only_get_is_answered(exporter: Exporter, key: str, method: str) -> None:
    assert request(exporter, key, method=method)[0] == 405


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metrics?x=1", "/../metrics"])
def test_only_the_path_of_the_metrics_is_answered(exporter: Exporter, key: str, path: str) -> None:
    assert request(exporter, key, path=path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "127.0.0.1:x", "", "localhost:1:2"])
def test_a_host_that_is_not_this_machine_is_refused_even_with_the_key(exporter: Exporter, key: str, host: str) -> None:
    assert request(exporter, key, host=host)[0] == 400


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9090", "[::1]:9090", "[::1]"])
def test_the_names_of_loopback_are_allowed(exporter: Exporter, key: str, host: str) -> None:
    assert request(exporter, key, host=host)[0] == 200


def test_the_key_is_readable_by_its_owner_only_and_survives_a_restart(tmp_path: Path) -> None:
    Exporter(tmp_path).close()
    path = tmp_path / "prometheus.key"
    key = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    Exporter(tmp_path).close()
    assert path.read_text() == key


def test_a_key_that_others_could_read_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "prometheus.key"
    path.write_text("x" * 43)
    path.chmod(0o644)
    Exporter(tmp_path).close()
    assert path.read_text() != "x" * 43
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_in_place_of_the_key_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("y" * 43)
    target.chmod(0o600)
    os.symlink(target, tmp_path / "prometheus.key")
    Exporter(tmp_path).close()
    assert not (tmp_path / "prometheus.key").is_symlink()
    assert target.read_text() == "y" * 43


def test_a_port_in_use_is_an_error_that_names_port_and_remedy(exporter: Exporter, tmp_path: Path) -> None:
    with pytest.raises(PortInUse, match=rf"monitor\.prometheus\.port={exporter.port} is in use.*set .* to 0"):
        Exporter(tmp_path, port=exporter.port)


def test_a_hundred_idle_connections_hold_few_threads_and_keep_nobody_out(exporter: Exporter, key: str) -> None:
    before, deadline = threading.active_count(), time.monotonic() + 10.0
    idle = [socket.create_connection(("127.0.0.1", exporter.port)) for _ in range(100)]
    assert request(exporter, key)[0] == 200
    while threading.active_count() > before + MAX_STRANGERS:  # those that made room are going
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for connection in idle:
        connection.close()


def test_a_client_that_sends_a_byte_now_and_then_is_cut_off_as_soon_as_a_silent_one(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer_queue.net.keyed_http.KEY_SECONDS", 0.5)
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=0.05) as slow, contextlib.suppress(OSError):
        while time.monotonic() - begun < 4.0:
            slow.send(b"G")
            with contextlib.suppress(TimeoutError):
                if slow.recv(1) == b"":
                    break
    assert 0.4 < time.monotonic() - begun < 4.0


def test_a_value_that_the_table_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="no such metric"):
        Values().set("streamrl_unknown", 1.0)
    with pytest.raises(ValueError, match=r"registry\.py has"):
        Values().set("streamrl_queue_rows", 1.0)
    with pytest.raises(ValueError, match="has the labels"):
        Values().replace({"streamrl_queue_rows": {("train", "ready"): 1.0}})


def test_what_each_engine_does_is_there_and_goes_with_it(exporter: Exporter, key: str) -> None:
    busy = ServerLoad(
        3, 5, 8, 2, 1000, 4.0, preemptions=1, cache_usage=0.25, first_tokens=10, queue_seconds=2.0,
        first_token_seconds=3.0, prompt_tokens=400, cached_tokens=100, weights_seconds=6.0,
    )  # fmt: skip
    exporter.set_engines({"server-0": busy, "server-1": ServerLoad(0, 0, 8, 2, 0, 0.0, asleep=True)})
    found = scrape(exporter, key)
    first, second = (("engine", "server-0"),), (("engine", "server-1"),)
    assert found["streamrl_engine_requests", (*first, ("state", "waiting"))] == 5
    assert found["streamrl_engine_tokens_total", first] == 1000
    assert found["streamrl_engine_first_token_seconds_total", first] == 3
    assert found["streamrl_engine_queue_seconds_total", first] == 2
    assert found["streamrl_engine_cached_tokens_total", first] == 100
    assert ("streamrl_engine_cached_tokens_total", second) not in found, "it does not tell"
    assert found["streamrl_weight_age_seconds", first] == 6
    assert found["streamrl_engine_asleep", second] == 1
    exporter.set_engines({"server-0": busy})
    assert not [name for name, labels in scrape(exporter, key) if labels == second]


def test_servers_are_counted_by_state_at_the_time_of_the_scrape(exporter: Exporter, key: str) -> None:
    service = {"server-0": ("serving", 0), "server-1": ("out", 1)}
    exporter.follow_service(lambda: service)
    found = scrape(exporter, key)
    assert {labels[0][1]: count for (name, labels), count in found.items() if name == "streamrl_rollout_servers"} == {
        "serving": 1, "asleep": 0, "draining": 0, "out": 1,
    }  # fmt: skip
    service["server-1"] = ("serving", 1)
    found = scrape(exporter, key)
    assert found["streamrl_rollout_servers", (("state", "serving"),)] == 2
    assert found["streamrl_rollout_outages_total", (("engine", "server-1"),)] == 1


def test_the_stages_of_a_weight_sync_are_one_metric(exporter: Exporter, key: str) -> None:
    exporter.update(metrics={f"weights/seconds/{stage}": 0.5 for stage in ("gather", "pause")})
    found = scrape(exporter, key)
    assert found["streamrl_weight_sync_stage_seconds", (("stage", "pause"),)] == 0.5
