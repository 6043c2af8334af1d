"""The queue as processes of their own: what a kill -9 of any of them does to clients (nothing), and who gets in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from transfer_queue.client import QueueClient
from transfer_queue.clients.sync_client import SyncQueueClient
from transfer_queue.errors import DeadlineExceeded, Disconnected, Invalid, QueueClosed
from transfer_queue.keys import row_key
from transfer_queue.net.codec import decode_response, encode
from transfer_queue.net.loop import LoopThread
from transfer_queue.net.messages import VERSION, Failed, GroupSpec, Hello, Request, SessionClose, Stats, TaskSpec
from transfer_queue.service import supervisor
from transfer_queue.service.lifetime import wait_for_exit
from transfer_queue.service.node import UnitService
from transfer_queue.service.queue_service import QueueService, read_address
from transfer_queue.storage.unit_files import replace_file

GENERATE = TaskSpec("generate", "prompt", "clock", 20.0)
TRAIN = TaskSpec("train", "rows", "incarnation")


@pytest.fixture
async def service(tmp_path):
    service = QueueService(
        tmp_path / "queue", storage_dir=tmp_path, unit_budget_bytes=64 << 20, segment_bytes=256 << 10
    )
    await service.astart()
    yield service
    await service.astop(clean=True)


@pytest.fixture
async def client(service):
    client = await QueueClient.connect(service.address, name="trainer")
    yield client
    await client.close()


def kill(service: QueueService, *names: str) -> None:
    for name, pid in service.pids().items():
        if any(name.startswith(prefix) for prefix in names):
            os.kill(pid, signal.SIGKILL)


def restarts_of(service: QueueService, *names: str) -> list[tuple[str, int]]:
    return [(name, count) for name, count in service.restarts().items() if name.startswith(names)]


async def traffic(client: QueueClient, acknowledged: dict[str, np.ndarray], stop: asyncio.Event) -> None:
    """Put rows one after the other until told to stop; note those that were acknowledged."""
    i = 0
    while not stop.is_set():
        row = np.arange(i, i + 500)
        await client.put("p", [f"k{i}"], {"x": [row], "o": [{"i": i}]}, tags=[{"i": i}])
        acknowledged[f"k{i}"] = row
        i += 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def more(acknowledged: dict[str, np.ndarray]) -> None:
    """Wait until a few more puts have been acknowledged."""
    count = len(acknowledged) + 5
    await until(lambda: len(acknowledged) > count)


async def assert_nothing_lost(client: QueueClient, acknowledged: dict[str, np.ndarray]) -> None:
    keys = list(acknowledged)
    got = await client.get("p", keys)
    assert all(np.array_equal(a, acknowledged[k]) for a, k in zip(got["x"].rows_list(), keys, strict=True))
    assert {tag["i"] for tag in (await client.list("p"))["p"].values()} >= set(range(len(keys)))


@pytest.mark.chaos
@pytest.mark.parametrize("victims", [("controller",), ("unit",), ("controller", "unit")])
async def test_a_kill_loses_nothing_acknowledged_and_calls_go_on(service, client, victims):
    acknowledged: dict[str, np.ndarray] = {}
    stop = asyncio.Event()
    putting = asyncio.create_task(traffic(client, acknowledged, stop))
    for kills in (1, 2):
        await more(acknowledged)
        kill(service, *victims)
        await until(lambda n=kills: all(count == n for _, count in restarts_of(service, *victims)))
        await until(lambda: len(service.pids()) == 3)
    await more(acknowledged)
    stop.set()
    await asyncio.wait_for(putting, 10)
    await assert_nothing_lost(client, acknowledged)


@pytest.mark.chaos
async def test_a_waiting_call_survives_the_death_of_the_controller(service, client):
    await client.open_partition("p", tasks=[GENERATE])
    worker = await QueueClient.connect(service.address, name="worker")
    waiting = asyncio.create_task(worker.lease("p", "generate", groups=1, wait=20))
    await asyncio.sleep(0.1)
    kill(service, "controller")
    await client.admit("p", [GroupSpec("u0", 1, 0)], {"raw_prompt": ["?"]})
    leased = await asyncio.wait_for(waiting, 5)
    assert leased.groups[0].uid == "u0"
    closes = [SessionClose("u0", 0, [row_key("u0", 0)])]
    kill(service, "controller")
    await worker.put("p", [row_key("u0", 0)], {"x": np.arange(1)}, token=leased.token, closes=closes)
    await worker.close()


@pytest.mark.chaos
async def test_a_killed_service_started_again_on_its_directory_goes_on(tmp_path):
    """The service runs in a process of its own, which is killed: its children die with it, the bytes stay."""
    directory = tmp_path / "queue"
    owner = start_owner(directory, tmp_path)
    client = await QueueClient.connect(read_address(directory), name="trainer")
    acknowledged: dict[str, np.ndarray] = {}
    stop = asyncio.Event()
    putting = asyncio.create_task(traffic(client, acknowledged, stop))
    await more(acknowledged)
    owner.kill()
    owner.wait()
    service = QueueService(directory, storage_dir=tmp_path)
    await service.astart()
    await more(acknowledged)
    stop.set()
    await asyncio.wait_for(putting, 10)
    await assert_nothing_lost(client, acknowledged)
    await client.close()
    await service.astop(clean=True)


def start_owner(directory: Path, storage: Path) -> subprocess.Popen:
    code = f"""
        import sys, threading
        from transfer_queue.service.queue_service import QueueService
        QueueService({str(directory)!r}, storage_dir={str(storage)!r}, unit_budget_bytes=64 << 20).start()
        sys.stdout.write("ready\\n"); sys.stdout.flush()
        threading.Event().wait()
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=Path.cwd())
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    return owner


@pytest.mark.chaos
async def test_the_death_of_a_client_is_noticed_at_once_and_its_lease_goes_back(service, client):
    await client.open_partition("p", tasks=[TaskSpec("generate", "prompt", "clock", 600.0)])
    await client.admit("p", [GroupSpec("u0", 1, 0)], {"raw_prompt": ["?"]})
    code = f"""
        import os
        from transfer_queue.clients.sync_client import SyncQueueClient
        worker = SyncQueueClient({service.address!r}, "worker")
        worker.lease("p", "generate", groups=1)
        os.kill(os.getpid(), 9)
    """
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", textwrap.dedent(code)])
    again = await client.lease("p", "generate", groups=1, wait=2)
    assert again.groups[0].attempt == 1


async def test_reads_and_writes_over_the_wire_give_the_same_bytes(service, client):
    remote = await QueueClient.connect(service.address, name="elsewhere", force_remote=True)
    big = np.random.default_rng(0).integers(0, 255, (2, 20 << 20), dtype=np.uint8)
    await remote.put("p", ["a", "b"], {"big": big, "o": ["x", {"y": 1}]})
    for reader in (client, remote):
        got = await reader.get("p", ["b", "a"])
        assert np.array_equal(got["big"].values, big[::-1])
        assert got["o"].rows_list() == [{"y": 1}, "x"]
    await remote.close()


async def test_units_of_another_node_spill_where_they_are_told_and_go_on_there(tmp_path):
    for place in ("near", "disk"):
        (tmp_path / place).mkdir()
    options: dict[str, Any] = {"bind": "127.0.0.1", "unit_budget_bytes": 4 << 20, "segment_bytes": 1 << 20}
    head = QueueService(tmp_path / "queue", storage_dir=tmp_path / "near", units=1, spill_budget_bytes=0, **options)
    await head.astart()
    options |= {"units": [7], "storage_dir": tmp_path, "spill_dir": tmp_path / "disk", "spill_budget_bytes": 32 << 20}
    node = UnitService(tmp_path / "node", head.address, **options)
    await node.astart()
    client = await QueueClient.connect(head.address, name="c")
    rows = np.random.default_rng(0).integers(0, 255, (16, 1 << 20), dtype=np.uint8)
    for i, row in enumerate(rows):
        await client.put("p", [f"k{i}"], {"x": row[None]})
    units = {unit.unit: unit for unit in (await client.stats()).units}
    assert units[0].spill_budget == 0
    assert units[7].spill_budget == 32 << 20
    assert units[7].spilled > 0
    home = tmp_path / "disk" / f"tq-{head.address['run']}.7"
    assert list((home / "unit-7").glob("*.seg"))
    await node.astop()
    again = UnitService(tmp_path / "node", head.address, units=[7], bind="127.0.0.1", segment_bytes=1 << 20)
    await again.astart()
    assert np.array_equal((await client.get("p", [f"k{i}" for i in range(16)]))["x"].values, rows)
    await again.astop(clean=True)
    assert not home.exists()
    await client.close()
    await head.astop(clean=True)


@pytest.mark.chaos
async def test_a_remote_read_survives_the_death_of_the_unit(service, client):
    remote = await QueueClient.connect(service.address, name="elsewhere", force_remote=True)
    await client.put("p", ["a"], {"x": np.arange(1000)[None]})
    await remote.get("p", ["a"])
    kill(service, "unit")
    assert (await asyncio.wait_for(remote.get("p", ["a"]), 10))["x"].values[0, 999] == 999
    await remote.close()


async def test_a_client_with_a_wrong_key_or_run_is_refused(service, tmp_path):
    replace_file(tmp_path / "wrong", "0" * 64)
    with pytest.raises(Invalid, match="key"):
        await QueueClient.connect({**service.address, "key_file": str(tmp_path / "wrong")}, name="x", timeout=5)
    with pytest.raises(Invalid, match="run"):
        await QueueClient.connect({**service.address, "run": "other"}, name="x", timeout=5)


async def test_a_stranger_gets_failed_and_nothing_else(service, client):
    hello = Hello(VERSION, service.address["run"], "", "stranger", os.getpid())
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2)
        sock.connect(service.address["socket"].removeprefix("unix://"))
        sock.sendall(framed(b"stranger" * 3))
        for request in (Request(1, Stats()), Request(2, hello), Request(3, Stats())):
            sock.sendall(framed(encode(request)))
            (length,) = struct.unpack("<I", await asyncio.to_thread(sock.recv, 4))
            assert isinstance(decode_response(sock.recv(length)).body, Failed)
    assert (await client.stats()).clients == 1


MALFORMED = ([b""], [b"\xc1"], [b"\x91" * 100_000], [b"a", b"b"], [os.urandom(1000)] * 3, [b"\x92\x01\x80"])


async def test_clients_of_a_stopped_service_fail_at_once_and_go_on_when_it_is_started_again(service, client):
    await client.put("p", ["a"], {"x": np.arange(1)})
    waiting = asyncio.create_task(client.lease("p", "nobody", groups=1, wait=60.0))
    await asyncio.sleep(0.1)
    await service.astop()
    async with asyncio.timeout(5):
        for work in (waiting, client.list(), QueueClient.connect(service.address, name="late")):
            with pytest.raises(QueueClosed, match=r"closed by its owner; start it again on .*queue"):
                await work
    await service.astart()
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(QueueClosed):
                assert await client.list("p") == {"p": {"a": {}}}
                break
            await asyncio.sleep(0.05)  # the connection is made again


async def test_a_process_that_cannot_be_started_again_is_tried_again_until_it_can(service, client, monkeypatch):
    refused = [OSError(12, "Cannot allocate memory")] * 2
    popen = supervisor.subprocess.Popen
    monkeypatch.setattr(
        supervisor.subprocess, "Popen", lambda *a, **k: raise_(refused.pop()) if refused else popen(*a, **k)
    )
    kill(service, "controller")
    async with asyncio.timeout(10):
        await client.put("p", ["a"], {"x": np.arange(1)})
    assert service.restarts()["controller"] == 3


def raise_(error: BaseException) -> None:
    raise error


def test_the_processes_of_a_queue_import_this_package_and_nothing_of_what_is_in_it_by_itself():
    paths = supervisor._environment()["PYTHONPATH"].split(os.pathsep)
    assert Path(paths[0], "transfer_queue", "service").is_dir()


async def test_an_argument_of_a_wrong_type_is_refused_at_once_by_name(client):
    async with asyncio.timeout(10):
        with pytest.raises(Invalid, match="^ack: token: .*, got `int`; give the token of the lease"):
            await client.ack("train", 12345, ["a"], step=1)
        with pytest.raises(Invalid, match=r"^drop: uids\[0\]: Expected `str`, got `int`"):
            await client.drop("train", [1], "stale")
        with pytest.raises(Invalid, match="durability: .*'disk'; expected one of '', 'memory', 'spill', 'journal'"):
            await client.open_partition("train", tasks=[], durability="disk")  # pyright: ignore[reportArgumentType]
        assert await client.list() == {}


async def test_malformed_frames_are_ignored_by_controller_and_units(service, client):
    path = service.address["socket"].removeprefix("unix://")
    for frames in MALFORMED:
        for data in (framed(b"stranger" * 3, *frames), framed(*frames), b"".join(frames)):
            with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(ConnectionError):
                sock.connect(path)
                sock.sendall(data)
    for name in ("u0", "u1"):
        unit = zmq.Context.instance().socket(zmq.DEALER)
        unit.connect(f"ipc://{Path(path).parent / name}")
        for frames in MALFORMED:
            unit.send_multipart(frames)
        unit.close(linger=200)
    before = service.pids()
    await client.put("p", ["a"], {"x": np.arange(1)})
    remote = await QueueClient.connect(service.address, name="elsewhere", force_remote=True)
    assert (await remote.get("p", ["a"]))["x"].values.tolist() == [0]
    await remote.close()
    assert service.pids() == before


def framed(*frames: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


async def test_what_the_queue_writes_is_private(service, client):
    await client.put("p", ["a"], {"x": np.arange(1)})
    sockets = Path(service.address["socket"].removeprefix("unix://")).parent
    (unit, *_) = (await client.lookup("p", ["a"])).units
    for directory in (sockets, Path(unit.directory), service.directory):
        assert directory.stat().st_mode & 0o077 == 0
    segments = Path(unit.directory).iterdir()  # noqa: ASYNC240
    for file in (service.directory / "key", service.directory / "journal", *segments):
        assert file.stat().st_mode & 0o077 == 0


async def test_a_clean_stop_ends_all_processes_and_removes_the_bytes(tmp_path):
    service = QueueService(tmp_path / "queue", storage_dir=tmp_path)
    await service.astart()
    pids = list(service.pids().values())
    assert len(pids) == 3
    await service.astop(clean=True)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # noqa: ASYNC240
    assert os.listdir(tmp_path) == ["queue"]
    address = await service.astart()
    again = await QueueClient.connect(address, name="again")
    await again.put("p", ["a"], {"x": np.arange(1)})
    await again.close()
    await service.astop(clean=True)


def test_a_second_service_on_a_directory_is_refused_while_the_first_lives(tmp_path):
    with QueueService(tmp_path / "queue", storage_dir=tmp_path, units=1) as first:
        second = QueueService(tmp_path / "queue", storage_dir=tmp_path, units=1)
        with pytest.raises(Invalid, match="held by process"):
            second.start()
        assert len(first.pids()) == 2


def test_storage_that_cannot_work_is_an_error_before_anything_starts(tmp_path):
    with pytest.raises(Invalid, match=r"lower unit_budget_bytes.*set storage_dir"):
        QueueService(tmp_path / "queue", storage_dir=tmp_path, unit_budget_bytes=1 << 60)
    with pytest.raises(Invalid, match="does not exist"):
        QueueService(tmp_path / "queue", storage_dir=tmp_path / "nowhere")
    assert not (tmp_path / "queue").exists()


async def test_an_address_without_a_queue_fails_with_what_to_do(tmp_path, service):
    with pytest.raises(Disconnected, match=r"`serve .*` starts one there"):
        read_address(tmp_path / "nothing")
    nowhere = {**service.address, "socket": f"unix://{tmp_path}/nobody"}
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"'x' waited 0\.3 s .* start the queue service"):
        await QueueClient.connect(nowhere, name="x", timeout=0.3)
    assert time.monotonic() - began < 2
    with pytest.raises(Invalid, match="by TCP need CURVE"):
        await QueueClient.connect({**service.address, "socket": "tcp://127.0.0.1:5555"}, name="x")


def test_a_rank_without_an_event_loop_uses_the_same_verbs(tmp_path):
    with QueueService(tmp_path / "queue", storage_dir=tmp_path, units=1) as service:
        with SyncQueueClient(service.address, "rank-0") as rank:
            rank.put("p", ["a"], {"x": np.arange(2)[None]}, tags=[{"seq_len": 2}])
            assert rank.get("p", ["a"])["x"].values.tolist() == [[0, 1]]
            assert rank.list() == {"p": {"a": {"seq_len": 2}}}
        with pytest.raises(RuntimeError, match="was closed"):
            rank.stats()


@pytest.mark.chaos
def test_a_rank_without_an_event_loop_survives_the_death_of_the_controller(tmp_path):
    service = QueueService(tmp_path / "queue", storage_dir=tmp_path, units=1)
    with service, SyncQueueClient(service.address, "rank-0") as rank:
        for i in range(30):
            if i % 10 == 5:
                kill(service, "controller")
            rank.put("p", [f"k{i}"], {"x": np.arange(i, i + 2)[None]})
        got = rank.get("p", [f"k{i}" for i in range(30)])
        assert got["x"].values[:, 0].tolist() == list(range(30))


async def test_the_environment_can_force_the_remote_path(service, client, monkeypatch):
    monkeypatch.setenv("TQ_FORCE_REMOTE", "1")
    remote = await QueueClient.connect(service.address, name="elsewhere")
    await remote.put("p", ["a"], {"x": np.arange(3)[None]})
    assert (await client.get("p", ["a"]))["x"].values.tolist() == [[0, 1, 2]]
    assert remote._access._mapped._mappings == {}
    await remote.close()


def test_a_process_that_never_closes_its_client_still_ends(tmp_path):
    with QueueService(tmp_path / "queue", storage_dir=tmp_path, units=1) as service:
        code = f"""
            from transfer_queue.clients.sync_client import SyncQueueClient
            SyncQueueClient({service.address!r}, "forgetful").put("p", ["a"], {{"o": [1]}})
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=10)


def test_a_queue_that_cannot_start_says_why_without_waiting_long(tmp_path):
    service = QueueService(tmp_path / "queue", storage_dir=tmp_path, units=1)
    (tmp_path / "queue" / "journal").write_bytes(b"this is no journal")
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="controller.*journal"):
        service.start(timeout=60)
    assert time.monotonic() - began < 15
    assert service.pids() == {}


def test_a_long_directory_still_has_sockets_with_short_paths(tmp_path):
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    with QueueService(deep, storage_dir=tmp_path, units=1) as service:
        assert len(service.address["socket"]) < 107
        assert QueueService(deep, storage_dir=tmp_path, units=1).address == service.address


def test_ctrl_c_twice_during_a_start_leaves_no_thread_no_process_and_no_lock(tmp_path, monkeypatch):
    """The first one ends the start, the second one the wait for the processes' end."""
    service = QueueService(tmp_path / "q", storage_dir=tmp_path, unit_budget_bytes=1 << 24)

    run, children = LoopThread.run, []

    def run_and_press(thread, work):
        if not children:
            run(thread, work)  # all serve
            children.extend(service.pids().values())
        else:
            work.close()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LoopThread, "run", run_and_press)
        with pytest.raises(KeyboardInterrupt):
            service.start()
    assert children
    assert "queue-service" not in [thread.name for thread in threading.enumerate()]
    for pid in children:
        assert wait_for_exit(pid, 10)
    with service:
        assert service.pids()


async def test_a_start_that_fails_quotes_no_earlier_life(tmp_path):
    (tmp_path / "unit-0.log").write_text("KeyboardInterrupt\n")
    starting = supervisor.Supervisor([supervisor.Child("unit-0", ["nothing"])], tmp_path)
    try:
        with pytest.raises(DeadlineExceeded, match="unit-0: wrote no log"):
            await starting.start(timeout=0.0)
    finally:
        await starting.stop()
