"""The metrics: who gets them, and what they say of a queue."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parsed

from transfer_queue.controller.account import BOUNDS, RequestAccount
from transfer_queue.errors import Disconnected, Invalid
from transfer_queue.net.keyed_http import KEY_SECONDS, MAX_HEADERS, MAX_STRANGERS, REQUEST_SECONDS
from transfer_queue.net.messages import PartitionStats, QueueStats, RequestStats, UnitStats
from transfer_queue.operations.metrics import families
from transfer_queue.operations.metrics_server import MetricsServer


class Text:
    """What a scrape gets, or an error that it meets."""

    error: Exception | None = None

    def __call__(self) -> bytes:
        if self.error is not None:
            raise self.error
        return b"tq_up 1\n"


@pytest.fixture
def text() -> Text:
    return Text()


@pytest.fixture
def server(text, tmp_path):
    server = MetricsServer(text, 0, tmp_path / "metrics.key")
    yield server
    server.close()


def ask(server: MetricsServer, method: str = "GET", path: str = "/metrics", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.endpoint, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def bearer(server: MetricsServer) -> str:
    return f"Bearer {server.key_file.read_text().strip()}"


def test_who_has_the_key_gets_the_metrics_and_nobody_else(server):
    assert ask(server, Authorization=bearer(server)) == (200, "tq_up 1\n")
    for wrong in ("", "Bearer ", "Bearer x", bearer(server) + "x", bearer(server)[:-1], "Basic " + bearer(server)[7:]):
        assert ask(server, Authorization=wrong)[0] == 401
    assert ask(server)[0] == 401


def test_a_page_that_rebinds_its_name_other_methods_and_other_paths_get_nothing(server):
    key = bearer(server)
    assert ask(server, Host="evil.example", Authorization=key)[0] == 400
    assert ask(server, "POST", Authorization=key)[0] == 405
    assert ask(server, path="/", Authorization=key)[0] == 404
    assert ask(server, Host="localhost:1", Authorization=key)[0] == 200


def test_the_key_is_for_its_owner_new_at_each_start_and_gone_at_the_end(text, tmp_path):
    path, keys = tmp_path / "metrics.key", []
    for _ in range(2):
        server = MetricsServer(text, 0, path)
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert (tmp_path / "metrics.endpoint").read_text() == f"{server.endpoint}\n"
        keys.append(path.read_text())
        server.close()
        assert list(tmp_path.iterdir()) == []
    assert keys[0] != keys[1]
    assert all(len(key) > 40 for key in keys)


def test_a_port_that_is_taken_is_told(server, text, tmp_path):
    with pytest.raises(Invalid, match=r"metrics\.port=\d+: Address already in use"):
        MetricsServer(text, int(server.endpoint.rpartition(":")[2]), tmp_path / "other.key")
    assert not (tmp_path / "other.key").exists()


def test_a_queue_that_does_not_answer_is_an_error_of_the_scrape(server, text):
    text.error = Disconnected("the controller is away")
    assert ask(server, Authorization=bearer(server)) == (503, "the controller is away\n")


def connected(server: MetricsServer) -> socket.socket:
    host, _, port = server.endpoint.partition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_connections_that_say_nothing_make_room_for_who_has_the_key(server):
    silent = [connected(server) for _ in range(MAX_STRANGERS)]
    try:
        began = time.monotonic()
        for _ in range(3):
            assert ask(server, Authorization=bearer(server)) == (200, "tq_up 1\n")
        assert time.monotonic() - began < KEY_SECONDS, "it need not wait until they are cut off"
        assert silent[0].recv(1) == b"", "the oldest made room"
    finally:
        for connection in silent:
            connection.close()


def test_connections_that_say_nothing_are_cut_off(server):
    with connected(server) as silent:
        began = time.monotonic()
        assert silent.recv(1) == b""
        assert time.monotonic() - began < REQUEST_SECONDS


def test_who_has_the_key_and_finds_no_place_is_told(server, text, monkeypatch):
    monkeypatch.setattr("transfer_queue.net.keyed_http.MAX_CONNECTIONS", 0)
    assert ask(server, Authorization=bearer(server)) == (503, "0 requests are at work; come back later\n")


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"GET / x HTTP/1.1", b"400 Bad Request"),
        (b"GET / HTTP/9.1", b"505 HTTP Version Not Supported"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * MAX_HEADERS, b"431 Request Header Fields Too Large"),
        (b"GET / HTTP/1.1" + b"\r\nX: y" * 101, b"431 Request Header Fields Too Large"),
    ],
)
def test_what_is_no_request_is_answered_in_plain_text(server, sent, answer):
    with connected(server) as connection:
        connection.sendall(sent + b"\r\n\r\n")
        told = connection.recv(4096)
        with contextlib.suppress(OSError):  # what was not read breaks the connection
            while more := connection.recv(4096):
                told += more
    assert answer in told.splitlines()[0]
    assert b"text/plain" in told
    assert b"<" not in told


# --- what they say ---------------------------------------------------------------------------------------------------


PARTITION = PartitionStats(
    depth={"ready": 2, "dropped": 3}, rows=4, nbytes=100, next_order=5, dropped={"stale": 3}, redelivered=1, dead={},
    oldest_age={"ready": 1.5}, max_groups=8,
)  # fmt: skip
STATS = QueueStats(
    epoch=2, partitions={"p": PARTITION}, clients=1,
    units=[UnitStats(unit=0, alive=True, used=8, budget=64, segments=1), UnitStats(1, False, 0, 64, 0)],
    requests={"Lease": RequestStats(counts=[2, *[0] * (len(BOUNDS) - 1), 1], seconds=3.0, refused={"fenced": 1})},
)  # fmt: skip


@pytest.fixture
def shown() -> dict[str, float]:
    """Each sample as it is scraped."""

    class Fixed:
        def collect(self):
            return families(STATS, {"controller": 1})

    registry = CollectorRegistry()
    registry.register(Fixed())  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    assert list(parsed(text))
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def test_the_metrics_say_what_the_statistics_say(shown):
    expected = {
        'tq_partition_rows{partition="p"}': 4,
        'tq_partition_groups{partition="p",state="ready"}': 2,
        'tq_partition_dropped_total{partition="p",reason="stale"}': 3,
        'tq_partition_redelivered_total{partition="p"}': 1,
        'tq_partition_oldest_age_seconds{partition="p",state="ready"}': 1.5,
        'tq_storage_unit_up{unit="0"}': 1,
        'tq_storage_unit_up{unit="1"}': 0,
        "tq_controller_epoch": 2,
        'tq_process_restarts_total{process="controller"}': 1,
        'tq_request_service_seconds_bucket{kind="Lease",le="0.0001"}': 2,
        'tq_request_service_seconds_bucket{kind="Lease",le="+Inf"}': 3,
        'tq_request_service_seconds_count{kind="Lease"}': 3,
        'tq_request_service_seconds_sum{kind="Lease"}': 3,
        'tq_requests_refused_total{code="fenced",kind="Lease"}': 1,
    }
    missing = {name: shown.get(name) for name, value in expected.items() if shown.get(name) != value}
    assert missing == {}, sorted(shown)


def test_counters_end_in_total_and_gauges_do_not():
    for family in families(STATS, {"controller": 1}):
        names = {sample.name for sample in family.samples}
        assert all(name.endswith("_total") == (family.type == "counter") for name in names), family
        assert re.fullmatch(r"tq_[a-z_]+", family.name)


def test_an_account_counts_each_request_in_its_class_and_each_refusal_by_its_code():
    account = RequestAccount()
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, 99.0):
        account.served("Watch", seconds)
    account.refused("Watch", "deadline")
    account.refused("Admit", "queue_full")
    stats = account.stats()
    assert stats["Watch"].counts == [2, 1, *[0] * (len(BOUNDS) - 2), 1]
    assert stats["Watch"].seconds == pytest.approx(99.0, abs=0.01)
    assert (stats["Watch"].refused, stats["Admit"].refused) == ({"deadline": 1}, {"queue_full": 1})
    assert sum(stats["Admit"].counts) == 0
