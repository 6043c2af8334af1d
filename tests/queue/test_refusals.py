"""What a confused or hostile peer, or a damaged file, can do to the queue: nothing but get an error that teaches."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zmq

from transfer_queue.clients.tags import plain_tags
from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.process import serve_controller
from transfer_queue.errors import Invalid
from transfer_queue.ledger import Ledger
from transfer_queue.local import LocalQueue
from transfer_queue.net import messages as m
from transfer_queue.net.bounds import check_request
from transfer_queue.net.codec import decode_response, encode, encode_request
from transfer_queue.net.messages import VERSION, Hello, Request, Welcome
from transfer_queue.net.transport import SocketTransport, host_id, read_key
from transfer_queue.service.queue_service import QueueService, read_address
from transfer_queue.storage.journal import MemoryJournal
from transfer_queue.storage.unit_files import UnitFiles, replace_file


async def run_controller(directory: Path, stop: asyncio.Event, ready: asyncio.Event) -> None:
    os.chmod(directory, 0o700)
    await serve_controller(
        directory, f"ipc://{directory}/c", run="r", key_file=str(directory / "key"), stop=stop,
        segment_bytes=1 << 20, ready=ready.set,
    )  # fmt: skip


async def test_a_process_id_that_cannot_be_one_does_not_end_the_controller(tmp_path):
    replace_file(tmp_path / "key", "ab" * 32)
    stop, ready = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(run_controller(tmp_path, stop, ready))
    await asyncio.wait_for(ready.wait(), 10)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.connect(f"ipc://{tmp_path}/c")
    for pid in (-1, 2**31, 2**31 - 1, 2**63 - 1, -(2**63), 0):
        socket.send(encode(Request(1, Hello(VERSION, "r", "ab" * 32, "x", pid, host_id()))))
        answer = decode_response(await asyncio.to_thread(socket.recv))
        assert isinstance(answer.body, Welcome), pid
    socket.close(linger=0)
    assert not serving.done()
    stop.set()
    await asyncio.wait_for(serving, 10)


@pytest.mark.parametrize("content", ["", "\n", "ab" * 15])
async def test_a_key_file_without_a_key_is_refused_by_everybody(tmp_path, content):
    replace_file(tmp_path / "key", content)
    with pytest.raises(Invalid, match="key file .* at least 32"):
        read_key(str(tmp_path / "key"))
    with pytest.raises(Invalid, match="key file"):
        await run_controller(tmp_path, asyncio.Event(), asyncio.Event())
    with pytest.raises(Invalid, match="key file"):
        QueueService(tmp_path, storage_dir=tmp_path, units=1, unit_budget_bytes=1 << 20)
    address = {"run": "r", "socket": f"ipc://{tmp_path}/c", "key_file": str(tmp_path / "key")}
    with pytest.raises(Invalid, match="key file"):
        await SocketTransport.connect(address, name="x", timeout=1)


def test_a_key_that_is_too_short_is_not_taken(tmp_path):
    with pytest.raises(Invalid, match="give at least 16"):
        QueueService(tmp_path, storage_dir=tmp_path, key=b"")


class Core:
    """A controller core and what it has answered."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, m.Response]] = []
        self.core = ControllerCore(Ledger(), send=lambda *sent: self.sent.append(sent), journal=MemoryJournal())
        self.requests = 0

    def ask(self, client: str, body: m.Mutation | m.Query) -> m.Reply | m.Push | None:
        """The answer, or None if the request waits."""
        self.requests += 1
        before = len(self.sent)
        self.core.handle(client, Request(self.requests, body), 0.0)
        return next((r.body for _, r in self.sent[before:] if r.id == self.requests), None)

    def hello(self, *clients: str) -> None:
        for client in clients:
            assert isinstance(self.ask(client, Hello(VERSION, "", "", client)), Welcome)


def registration(
    *, unit: int = 0, directory: str = "/u0", size: int = 1 << 20, budget: int = 1 << 26
) -> m.RegisterUnit:
    return m.RegisterUnit(m.UnitInfo(unit, directory, "", "n"), size, budget, [])


def assert_invalid(answer: object, words: str) -> None:
    assert isinstance(answer, m.Failed)
    assert answer.code == Invalid.code
    assert words in answer.message


def test_a_living_unit_cannot_be_taken_over_and_a_dead_one_can():
    core = Core()
    core.hello("unit", "thief")
    assert isinstance(core.ask("unit", registration()), m.Keep)
    assert_invalid(core.ask("thief", registration(directory="/etc")), "served by another process")
    assert isinstance(core.ask("unit", registration()), m.Keep)
    core.core.client_gone("unit", 0.0)
    assert isinstance(core.ask("thief", registration()), m.Keep)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (registration(size=1), "segment_bytes=1"),
        (registration(size=-1), "segment_bytes=-1"),
        (registration(budget=-1), "budget of -1"),
        (registration(unit=-1), "unit -1"),
        (registration(unit=1 << 40), "units are numbered"),
    ],
)
def test_a_unit_that_cannot_work_is_not_registered(body, words):
    core = Core()
    core.hello("unit")
    assert_invalid(core.ask("unit", body), words)
    assert isinstance(stats := core.ask("unit", m.Stats()), m.QueueStats)
    assert stats.units == []


@pytest.mark.parametrize(("n", "order"), [(0, 0), (65537, 0), (1, -1), (1, 2**62 + 1)])
def test_a_group_out_of_bounds_is_not_admitted(n, order):
    core = Core()
    core.hello("trainer")
    core.ask("trainer", m.OpenPartition("p", [m.TaskSpec("generate", "prompt")]))
    assert_invalid(core.ask("trainer", m.Admit("p", [m.GroupSpec("g", n, order)], [], 0.0)), "1 <= n <= 65536")


def test_a_full_disk_is_named_to_who_waits_for_a_segment():
    core = Core()
    core.hello("unit", "writer")
    core.ask("unit", registration())
    core.ask("unit", m.SegmentsMade(0, [], "/u0: No space left on device for 2 x 1048576 bytes"))
    assert core.ask("writer", m.SegmentRequest(100, wait=5.0)) is None
    core.core.tick(6.0)
    answers = [r.body for client, r in core.sent if client == "writer" and isinstance(r.body, m.Failed)]
    assert "unit 0 cannot make segments: /u0: No space left on device" in answers[-1].message


@pytest.mark.parametrize("content", ["", "x", "-1", "1.5", "7", "7 ", "7 0123456789abcdef", "1" * 5000])
def test_a_damaged_incarnation_says_which_file_and_what_to_do(tmp_path, content):
    (tmp_path / "incarnation").write_text(content)
    with pytest.raises(Invalid, match=r"incarnation holds .* remove the directory"):
        UnitFiles(tmp_path, 0, budget=1 << 20)


def test_an_incarnation_that_is_another_number_now_is_refused(tmp_path):
    files = UnitFiles(tmp_path, 0, budget=1 << 20)
    files.close()
    path = tmp_path / "incarnation"
    number, digest = path.read_text().split()
    path.write_text(f"{int(number) - 1} {digest}")
    with pytest.raises(Invalid, match=r"incarnation holds .* not a number with its digest.* remove the directory"):
        UnitFiles(tmp_path, 0, budget=1 << 20)
    path.write_text(f"{number} {digest}")
    assert UnitFiles(tmp_path, 0, budget=1 << 20).incarnation == files.incarnation + 1


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"run": "r"}', '{"run": 1, "storage": 2}'])
def test_a_damaged_description_says_which_file_and_what_to_do(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(Invalid, match=r"run\.json is damaged: .* remove the directory"):
        QueueService(tmp_path, storage_dir=tmp_path)
    with pytest.raises(Invalid, match=r"run\.json is damaged"):
        read_address(tmp_path)


async def test_a_local_queue_keeps_its_segments_in_the_storage_directory_and_finds_them_again(tmp_path):
    storage, directory = tmp_path / "storage", tmp_path / "queue"
    storage.mkdir()
    async with LocalQueue(directory=directory, storage_dir=storage) as queue:
        await queue.client("trainer").put("p", ["a"], {"x": np.arange(3)[None]})
    (home,) = storage.iterdir()
    assert list(home.glob("*.seg"))
    assert not list(directory.rglob("*.seg"))
    for again in (storage, None):
        async with LocalQueue(directory=directory, storage_dir=again) as queue:
            assert (await queue.client("trainer").get("p", ["a"]))["x"].values.tolist() == [[0, 1, 2]]
    assert list(storage.iterdir()) == [home]


def test_the_processes_of_a_queue_do_not_inherit_niceness_where_that_is_permitted():
    code = """
import os
from transfer_queue.service.lifetime import be_served_first
os.nice(5)
be_served_first()
try:
    os.setpriority(os.PRIO_PROCESS, 0, 0)
    expected = 0
except PermissionError:
    expected = os.getpriority(os.PRIO_PROCESS, 0)
assert os.getpriority(os.PRIO_PROCESS, 0) == expected
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


async def test_a_tag_without_end_is_refused_by_key_and_name():
    own: list = []
    own.append(own)
    tree: dict = {}
    tree["up"] = tree
    async with LocalQueue() as queue:
        client = queue.client("c")
        for tag, name in (({"a": 1, "t": own}, "t"), ({"t": {"u": [own]}}, "t"), (tree, "up")):
            with pytest.raises(TypeError, match=f"tag '{name}' of 'k2' is nested too deeply, or contains itself"):
                await client.put("p", ["k1", "k2"], {"x": np.arange(2)}, tags=[{}, tag])
        assert await client.list() == {}


def without_end(levels: int = 60) -> list:
    shared: list = [1]
    for _ in range(levels):
        shared = [shared, shared]
    return shared


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (m.Commit("p", ["k"], tags=[{"a": without_end()}]), "tag 'a' of 'k' has more than"),
        (m.Commit("p", [without_end()]), "put: keys has more than"),
        (m.Admit("p", [m.GroupSpec("u", 1, 1, tag={"a": without_end()})]), "tag of group 'u' has more than"),
        (m.Fetch("p", "t", [], 1, {"a": (without_end(),)}), "fetch: sampling has more than"),
        (m.Lookup(without_end(), []), "lookup: partition has more than"),
        (m.Lookup("p", ["x" * (1 << 20)] * 100), "lookup: keys has more than"),
        (m.Commit("p", ["k"] * 100, tags=[{"a": "x" * (1 << 20)}] * 100), "tags have more than"),
    ],
)
def test_a_request_that_cannot_be_written_out_is_refused_before_it_is(body, words):
    with pytest.raises(Invalid, match=words):
        encode_request(1, body)


def test_a_plain_value_is_walked_no_further_than_a_tag_may_be():
    with pytest.raises(Invalid, match="tag 'a' of 'k' has more than"):
        plain_tags(["k"], [{"a": without_end()}])
    own: dict = {}
    own["own"] = own
    with pytest.raises(Invalid, match="contains itself"):
        plain_tags(["k"], [{"a": own}])
    with pytest.raises(Invalid, match="array of .* numbers"):
        plain_tags(["k"], [{"a": np.broadcast_to(0, (1 << 40,))}])
    shared = [[0] * 1000] * 2000
    for check in (lambda tags: plain_tags(["k"] * 99, tags), lambda tags: check_request(m.Commit("p", [], tags=tags))):
        with pytest.raises(Invalid, match="send less at once"):
            check([{"a": shared}] * 99)
    assert plain_tags(["k"], [{"a": [{"b": (1, None)}]}]) == [{"a": [{"b": (1, None)}]}]


@pytest.mark.parametrize(
    "body",
    [
        m.Commit("\0load.mine", ["k"], tags=[{}]),
        m.Commit("p", ["\0mine"], tags=[{}]),
        m.Commit("p", ["k"], tags=[{}], closes=[m.SessionClose("\0u", 0, ["k"])]),
        m.OpenPartition("\0load.0123abcd.0"),
        m.OpenPartition("p", [m.TaskSpec("\0t", "prompt")]),
        m.Admit("p", [m.GroupSpec("\0u", 1, 1)]),
        m.Lease("p", "t", "\0holder"),
        m.Lookup("p", ["\0mine"]),
        m.AdoptPartitions({"\0load.0123abcd.0": "\0mine"}),
        m.Fetch("p", "\0t", [], 1),
    ],
)
def test_names_of_the_queue_s_own_are_taken_from_nobody(body):
    core = Core()
    core.hello("c")
    assert_invalid(core.ask("c", body), "begins with a NUL")
    with pytest.raises(Invalid):
        encode_request(1, body)


@pytest.mark.parametrize("wait", [float("nan"), float("inf"), 1e300])
def test_the_controller_lets_nobody_wait_for_ever(wait):
    core = Core()
    core.hello("c")
    assert_invalid(core.ask("c", m.Lease("p", "t", "c", 1, wait=wait)), "give seconds")


@pytest.mark.parametrize("ttl", [float("nan"), float("inf"), 1e300])
def test_no_lease_by_the_clock_lasts_for_ever(ttl):
    core = Core()
    core.hello("c")
    assert_invalid(core.ask("c", m.OpenPartition("p", [m.TaskSpec("t", "prompt", ttl=ttl)])), "give at most")


def test_no_fetch_asks_for_more_rows_than_there_can_be():
    core = Core()
    core.hello("c")
    assert_invalid(core.ask("c", m.Fetch("p", "t", [], 1 << 40)), "expected 1 to")
