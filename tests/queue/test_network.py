"""A queue that other nodes can reach: who gets in, what travels how, and that nothing else listens."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
import zmq

from transfer_queue.client import QueueClient
from transfer_queue.controller.process import ControllerServer
from transfer_queue.errors import DeadlineExceeded, Invalid, QueueClosed
from transfer_queue.net.addresses import endpoint_of, node_of
from transfer_queue.net.codec import encode
from transfer_queue.net.credentials import credentials
from transfer_queue.net.curve import check_network_endpoint
from transfer_queue.net.messages import VERSION, Hello, Request
from transfer_queue.service.lifetime import boot_id
from transfer_queue.service.queue_service import QueueService
from transfer_queue.storage.unit_files import replace_file


@pytest.fixture
async def service(tmp_path):
    """Bound to loopback by address, as it would be to a node's IP."""
    service = QueueService(
        tmp_path / "queue", storage_dir=tmp_path, unit_budget_bytes=64 << 20, units=1, bind="127.0.0.1"
    )
    await service.astart()
    yield service
    await service.astop(clean=True)


@pytest.fixture
def elsewhere(monkeypatch):
    """This process takes the way that another node would."""
    monkeypatch.setenv("TQ_FORCE_REMOTE", "1")


async def test_a_client_of_another_node_puts_and_gets_the_same_bytes(service, elsewhere):
    client = await QueueClient.connect(service.address, name="far")
    assert client._transport._endpoint.startswith("curve://127.0.0.1:")  # pyright: ignore[reportAttributeAccessIssue]
    big = np.random.default_rng(0).integers(0, 255, (2, 12 << 20), dtype=np.uint8)
    await client.put("p", ["a", "b"], {"big": big, "o": [{"x": 1}, "y"]}, tags=[{"t": 1}, {}])
    got = await client.get("p", ["b", "a"])
    assert np.array_equal(got["big"].values, big[::-1])
    assert got["o"].rows_list() == ["y", {"x": 1}]
    located = await client.lookup("p", ["a"])
    assert all(unit.endpoint.startswith("tcp://127.0.0.1:") for unit in located.units)
    await client.close()


async def test_the_same_node_takes_the_unix_socket(service):
    assert endpoint_of(service.address).startswith("unix://")
    client = await QueueClient.connect(service.address, name="near")
    await client.put("p", ["a"], {"x": np.arange(3)[None]})
    assert client._access._local == {0: True}
    await client.close()


async def test_clients_find_a_restarted_service_at_the_same_address(service, elsewhere):
    client = await QueueClient.connect(service.address, name="far")
    await client.put("p", ["a"], {"x": np.arange(3)[None]})
    await service.astop()
    again = QueueService(service.directory, bind="127.0.0.1", units=1)
    assert again.address == service.address
    await again.astart()
    assert (await client.get("p", ["a"]))["x"].values.tolist() == [[0, 1, 2]]
    await client.close()
    await again.astop()


def without_directory(service: QueueService, tmp_path: Path) -> dict[str, str]:
    """The address as a node has it that keeps no more of the queue than its key."""
    key = tmp_path / "node" / "key"
    key.parent.mkdir(mode=0o700)
    replace_file(key, (service.directory / "key").read_text())
    return {**service.address, "key_file": str(key)}


async def test_a_client_that_sees_no_directory_hears_at_once_that_the_queue_was_closed(service, elsewhere, tmp_path):
    client = await QueueClient.connect(without_directory(service, tmp_path), name="far")
    await client.put("p", ["a"], {"x": np.arange(3)[None]})
    waiting = [asyncio.create_task(client.lease("p", "nobody", groups=1, wait=60.0)) for _ in range(2)]
    await asyncio.sleep(0.1)
    await service.astop()
    async with asyncio.timeout(5):
        for work in (*waiting, client.list(), client.put("p", ["b"], {"x": np.arange(3)[None]})):
            with pytest.raises(QueueClosed, match=r"'far': .* closed by its owner; start it again on .*queue"):
                await work
    await service.astart()
    async with asyncio.timeout(20):
        while client.ended:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert (await client.get("p", ["a"]))["x"].values.tolist() == [[0, 1, 2]]
    await client.close()


async def test_a_client_that_sees_no_directory_waits_for_a_controller_that_was_ended_by_somebody_else(
    service, elsewhere, tmp_path
):
    client = await QueueClient.connect(without_directory(service, tmp_path), name="far")
    os.kill(service.pids()["controller"], signal.SIGTERM)
    assert await asyncio.wait_for(client.list(), 10) == {}
    await client.close()


def test_two_pods_that_share_no_directory_take_the_network(tmp_path, monkeypatch):
    """One kernel, the same path, another directory behind it; and the same directory by NFS, another kernel."""
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    address = {"socket": f"unix://{sockets}/c", "network": "curve://10.0.0.1:5555", "node": node_of(sockets)}
    assert endpoint_of(address) == address["socket"]
    shutil.rmtree(sockets)
    assert endpoint_of(address) == address["network"]
    (tmp_path / "other").mkdir()  # takes the inode that was free, perhaps
    sockets.mkdir()
    assert endpoint_of(address | {"node": f"{boot_id()}:0:0"}) == address["network"]
    monkeypatch.setattr("transfer_queue.net.addresses.boot_id", lambda: "another kernel")
    assert endpoint_of(address) == address["network"]


async def test_a_client_without_the_key_gets_nothing_and_the_queue_goes_on(service, elsewhere, tmp_path):
    os.chmod(tmp_path, 0o700)
    replace_file(tmp_path / "other", "cd" * 32)
    with pytest.raises(DeadlineExceeded, match="waited 0.5 s"):
        await QueueClient.connect(service.address | {"key_file": f"{tmp_path}/other"}, name="thief", timeout=0.5)
    place = service.address["network"].replace("curve", "tcp")
    keys = credentials("cd" * 32)
    for options in ({}, {zmq.CURVE_SERVERKEY: credentials(read(service)).server_public}):
        thief = zmq.Context.instance().socket(zmq.DEALER)  # without any key; with the server's, and one of its own
        for option, value in options.items():
            thief.setsockopt(option, value)
            thief.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
            thief.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
        thief.connect(place)
        thief.send(encode(Request(1, Hello(VERSION, service.address["run"], read(service), "thief"))))
        assert not await asyncio.to_thread(thief.poll, 500)
        thief.close(linger=0)
    client = await QueueClient.connect(service.address, name="far")
    assert (await client.stats()).clients == 1
    await client.close()


def read(service: QueueService) -> str:
    return Path(service.address["key_file"]).read_text()


async def test_a_recorded_curve_client_gets_nothing(service, elsewhere):
    """Every byte that a client sent is sent once more by somebody else: the server's answer is not for him."""
    host, _, port = service.address["network"].removeprefix("curve://").partition(":")
    recorded = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: bool) -> None:
        while data := await reader.read(65536):
            if keep:
                recorded.extend(data)
            writer.write(data)
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server, from_client = await asyncio.open_connection(host, int(port))
        await asyncio.gather(relay(reader, from_client, True), relay(to_server, writer, False), return_exceptions=True)

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    through = service.address | {"network": f"curve://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"}
    client = await QueueClient.connect(through, name="honest")
    before = await client.stats()
    assert len(recorded) > 500
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(bytes(recorded))
    answer = bytearray()
    try:
        async with asyncio.timeout(1):
            while data := await reader.read(65536):
                answer.extend(data)
    except (TimeoutError, ConnectionError):
        pass
    assert len(answer) < 500  # greeting and WELCOME: nothing that follows a proof of identity
    assert (await client.stats()).clients == before.clients
    writer.close()
    await client.close()
    proxy.close()


async def test_a_flood_of_strangers_costs_the_controller_little_and_is_told_once(service, elsewhere):
    client = await QueueClient.connect(service.address, name="far")
    host, _, port = service.address["network"].removeprefix("curve://").partition(":")
    used = cpu_seconds(service.pids()["controller"])
    for _ in range(100):
        for hello in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((host, int(port)), 5) as stray:
                stray.sendall(hello)
    await client.put("p", ["a"], {"x": np.arange(3)[None]})
    await asyncio.sleep(0.2)
    assert (cpu_seconds(service.pids()["controller"]) - used) / 200 < 0.001
    logged = (service.directory / "controller.log").read_text().splitlines()
    assert sum("turned away" in line for line in logged) <= 1
    await client.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_bulk_bytes_are_encrypted_when_that_is_asked(tmp_path, elsewhere):
    with QueueService(
        tmp_path / "queue", storage_dir=tmp_path, unit_budget_bytes=64 << 20, units=1, bind="127.0.0.1",
        encrypt_bulk=True,
    ) as service:  # fmt: skip
        client = await QueueClient.connect(service.address, name="far")
        await client.put("p", ["a"], {"x": np.arange(3)[None]})
        (unit,) = (await client.lookup("p", ["a"])).units
        assert unit.endpoint.startswith("curve://127.0.0.1:")
        assert (await client.get("p", ["a"]))["x"].values.tolist() == [[0, 1, 2]]
        await client.close()


@pytest.mark.parametrize(
    ("bind", "why"),
    [
        ("0.0.0.0", "listen on every interface"),
        ("::", "listen on every interface"),
        ("localhost", "not an IP address"),
        ("203.0.113.7", "give an IP of this machine"),
    ],
)
def test_an_address_that_is_not_this_nodes_own_is_refused(tmp_path, bind, why):
    with pytest.raises(Invalid, match=why):
        QueueService(tmp_path / "queue", storage_dir=tmp_path, units=1, bind=bind)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "tcp://10.0.0.1:5555", "curve://0.0.0.0:5555"])
async def test_requests_are_never_served_by_network_without_keys(endpoint):
    with pytest.raises(Invalid, match="CURVE|every interface"):
        ControllerServer([endpoint], "ab" * 32, lambda send: None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "endpoint",
    ["curve://", "curve://h:1", "curve://1.2.3.4", "curve://1.2.3.4:0", "curve://1.2.3.4:x", "ws://1.2.3.4:5"],
)
def test_an_endpoint_that_is_none_is_refused(endpoint):
    with pytest.raises(Invalid):
        check_network_endpoint(endpoint)


def test_keys_are_in_private_files_and_in_no_argument_list_or_environment(tmp_path):
    with QueueService(tmp_path / "queue", storage_dir=tmp_path, units=1, bind="127.0.0.1") as service:
        assert_keys_are_hidden(service)


def assert_keys_are_hidden(service: QueueService) -> None:
    key = read(service)
    assert Path(service.address["key_file"]).stat().st_mode & 0o077 == 0
    assert service.directory.stat().st_mode & 0o077 == 0
    secrets = [key, credentials(key).server_secret.decode(), credentials(key).client_secret.decode()]
    for pid in service.pids().values():
        for place in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{place}").read_bytes().decode(errors="replace")
            assert not any(secret in text for secret in secrets)
    for log in service.directory.glob("*.log"):
        assert not any(secret in log.read_text() for secret in secrets)
    assert key not in repr(credentials(key))
