"""`doctor`: what it finds wrong, with the remedy, and that it touches nothing that lives."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import socket
import time

import pytest

import transfer_queue as tq
import transfer_queue.operations.doctor as diagnosis
from transfer_queue.__main__ import main
from transfer_queue.client import SyncQueueClient
from transfer_queue.operations.doctor import doctor
from transfer_queue.operations.listeners import tcp_listeners, unix_listeners
from transfer_queue.service.queue_service import QueueService


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    directory = tmp_path_factory.mktemp("doctor")
    with QueueService(directory / "queue", storage_dir=directory, unit_budget_bytes=64 << 20, units=1) as service:
        yield service


def test_a_queue_on_one_node_listens_only_to_private_unix_sockets(service):
    report = doctor(service.directory)
    assert {one.process for one in report.listeners} == {"controller", "unit-0"}
    assert all(one.endpoint.startswith("unix /") for one in report.listeners)
    assert all(one.auth == "private directory, run key" for one in report.listeners)
    for pid in service.pids().values():
        assert tcp_listeners(pid) == []


def test_a_client_on_the_same_node_opens_no_port(service):
    before = tcp_listeners(os.getpid())  # other tests may have some
    with SyncQueueClient(service.address, "client") as client:
        client.put("ports", ["k"], {"x": [1]})
        client.get("ports", ["k"])
        assert tcp_listeners(os.getpid()) == before


def test_a_bound_queue_listens_only_at_the_address_it_was_given(tmp_path):
    options = {"storage_dir": tmp_path, "unit_budget_bytes": 64 << 20, "units": 1}
    with QueueService(tmp_path / "queue", bind="127.0.0.1", **options) as service:
        ports = [listener for pid in service.pids().values() for listener in tcp_listeners(pid)]
        assert len(ports) == 2
        assert {ip for ip, _ in ports} == {"127.0.0.1"}
        auth = {one.process: one.auth for one in doctor(service.directory).listeners if one.endpoint.startswith("tcp")}
        assert auth == {
            "controller": "CURVE with the run's keys", "unit-0": "MAC of the run's key on each frame"
        }  # fmt: skip


def test_what_this_process_listens_to_is_what_it_opened(tmp_path):
    with socket.socket() as listening, socket.socket(socket.AF_UNIX) as unix, socket.socket() as idle:
        listening.bind(("127.0.0.1", 0))
        idle.bind(("127.0.0.1", 0))
        unix.bind(str(tmp_path / "s"))
        listening.listen()
        unix.listen()
        assert listening.getsockname() in tcp_listeners(os.getpid())
        assert idle.getsockname() not in tcp_listeners(os.getpid())
        assert str(tmp_path / "s") in unix_listeners(os.getpid())
    if socket.has_ipv6:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as six:
            assert ("::1", six.getsockname()[1]) in tcp_listeners(os.getpid())


def test_the_report_names_versions_room_and_budgets(service):
    text = doctor(service.directory).text()
    assert re.search(r"libzmq \d", text)
    assert re.search(r"/dev/shm: tmpfs, .* may be written", text)
    assert re.search(r"1 unit of at most 64 MiB each", text)


def test_what_is_wrong_is_named_with_its_remedy(tmp_path, monkeypatch):
    service = QueueService(tmp_path / "queue", storage_dir=tmp_path, unit_budget_bytes=64 << 20, units=1)
    os.chmod(tmp_path / "queue" / "key", 0o644)
    monkeypatch.setattr(diagnosis, "ray_store_bytes", lambda: 1 << 50)
    found = {finding.what: finding.remedy for finding in doctor(service.directory).findings}
    assert f"chmod go= {tmp_path}/queue/key" in found[f"others can read {tmp_path}/queue/key"]
    assert "start the queue service" in found["controller does not run"]
    (ray,) = [remedy for what, remedy in found.items() if "Ray's object store" in what]
    assert "object_store_memory" in ray
    monkeypatch.setattr(diagnosis, "free_bytes", lambda _: 60 << 20)
    (small,) = [x for x in doctor(service.directory).findings if x.what.startswith("only 60 MiB of /dev/shm")]
    assert "--shm-size" in small.remedy
    assert "storage_dir" in small.remedy


def test_a_directory_without_or_with_a_damaged_queue_is_a_finding(tmp_path):
    assert any("holds no queue" in finding.what for finding in doctor(tmp_path).findings)
    (tmp_path / "run.json").write_text("{")
    assert any("damaged" in finding.what for finding in doctor(tmp_path).findings)


class Distribution:
    version = "0.1.11"

    def __init__(self, place) -> None:
        self.place = place

    def locate_file(self, name: str):
        return self.place / name


@pytest.mark.parametrize(("same", "words"), [(True, "installed over this package"), (False, "is installed too")])
def test_the_peers_package_over_or_beside_ours_is_found(tmp_path, monkeypatch, capsys, same, words):
    place = diagnosis.Path(diagnosis.__file__).parents[2] if same else tmp_path
    real = importlib.metadata.distribution
    monkeypatch.setattr(
        importlib.metadata, "distribution", lambda name: Distribution(place) if name == "TransferQueue" else real(name)
    )
    (finding,) = [x for x in doctor().findings if "TransferQueue" in x.what]
    assert words in finding.what
    assert "pip uninstall TransferQueue" in finding.remedy
    main(["stat", "-q", str(tmp_path)])
    assert words in capsys.readouterr().err


def test_clean_removes_what_dead_runs_left_and_never_what_lives(service, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(diagnosis, "SHM", tmp_path)  # what lies in the real one is not ours to remove
    monkeypatch.setattr(diagnosis.tempfile, "gettempdir", lambda: str(tmp_path))
    storage = service.directory.parent
    live = next(storage.glob("tq-*"))
    dead = storage / "tq-0123456789ab"
    (dead / "unit-0").mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "owner").write_text(str(tmp_path / "gone"))
    (dead / "unit-0" / "x.seg").write_bytes(bytes(3 << 20))
    for path in (*dead.rglob("*"), dead, live):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    assert main(["doctor", "--storage-dir", str(storage)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"dead run 0123456789ab: 3.0 MiB, written 2 h ago", out)
    assert main(["doctor", "--clean", "--stopped", "--storage-dir", str(storage)]) == 0
    assert "removed: dead run 0123456789ab" in capsys.readouterr().out
    assert not dead.exists()
    assert live.exists()


def test_what_other_queues_left_is_a_note_in_the_report_of_a_healthy_one(service, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(diagnosis, "SHM", tmp_path)
    monkeypatch.setattr(diagnosis.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(diagnosis, "_packages_in_the_way", lambda: [])
    monkeypatch.setattr(diagnosis, "free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr(diagnosis, "ray_store_bytes", lambda: 0)
    dead = tmp_path / "tq-0123456789ab"
    (dead / "unit-0").mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "owner").write_text(str(tmp_path / "gone"))
    for path in (*dead.rglob("*"), dead):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    assert main(["doctor", "-q", str(service.directory)]) == 0
    out = capsys.readouterr().out
    assert "to do\n  nothing\n" in out
    assert re.search(r"of other queues\n  1 dead run left [\d.]+ KiB\n    -> .*--clean", out)
    assert main(["doctor", "--storage-dir", str(tmp_path)]) == 1


def test_without_a_directory_it_examines_the_queue_of_this_process(service, monkeypatch):
    for name in ("TQ_ADDRESS", "TQ_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    assert doctor().listeners == []
    tq.init({"address": service.address})
    try:
        assert {one.process for one in doctor().listeners} == {"controller", "unit-0"}
    finally:
        tq.close()


def test_the_report_is_there_for_programs_too(service, capsys):
    main(["doctor", "--json", "-q", str(service.directory)])
    report = json.loads(capsys.readouterr().out)
    assert {one["process"] for one in report["listeners"]} == {"controller", "unit-0"}
    assert set(report) == {"versions", "storage", "listeners", "leftovers", "findings", "notes"}
