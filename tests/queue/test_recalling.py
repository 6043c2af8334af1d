"""Writers that do nothing hold no memory that others wait for: it is asked back, and only what is worth it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import numpy as np
import pytest

from transfer_queue.client import QueueClient
from transfer_queue.clients.sync_client import SyncQueueClient
from transfer_queue.controller import recalling
from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.recalling import ROUND
from transfer_queue.ledger import Ledger
from transfer_queue.local import LocalQueue
from transfer_queue.net import messages as m
from transfer_queue.service.queue_service import QueueService
from transfer_queue.storage.journal import MemoryJournal
from transfer_queue.storage.segments import segment_id

SIZE = 64 << 10


class World:
    """A core, one unit that makes and frees what it is told to, and writers that only do what a test makes them do."""

    def __init__(self, *, segments: int, disk: int = 0) -> None:
        self.now, self.ids, self.made = 0.0, 0, 0
        self.answers: dict[tuple[str, int], Any] = {}
        self.pushes: list[tuple[str, Any]] = []
        self.asked: list[tuple[str, list[int]]] = []
        self.core = ControllerCore(Ledger(), send=self.send, journal=MemoryJournal(), segment_bytes=SIZE)
        self.ask("unit", m.Hello(m.VERSION, "", "", "unit"))
        info = m.UnitInfo(0, "/u", "", "n", "/disk")
        self.ask("unit", m.RegisterUnit(info, SIZE, segments * SIZE, [], [], disk * SIZE))

    def send(self, client: str, response: m.Response) -> None:
        if response.id:
            self.answers[client, response.id] = response.body
        else:
            self.pushes.append((client, response.body))

    def ask(self, client: str, body: Any) -> Any:
        """The answer, or None if the request waits."""
        self.ids += 1
        self.ticket = client, self.ids
        ticket = self.ticket
        self.core.handle(client, m.Request(self.ids, body), self.now)
        self.serve()
        self.ticket = ticket
        return self.answers.get(ticket)

    def serve(self) -> None:
        while self.pushes:
            client, push = self.pushes.pop(0)
            if isinstance(push, m.GiveBack):
                self.asked.append((client, push.segments))
            elif isinstance(push, m.MakeSegments):
                ids = [segment_id(0, 1, self.made + i, durable=push.durable) for i in range(push.count)]
                self.made += push.count
                self.ask("unit", m.SegmentsMade(0, [m.Segment(i, 0, push.nbytes) for i in ids]))

    def after(self, seconds: float) -> list[tuple[str, list[int]]]:
        """Who has been asked for what since the last call, that time included."""
        self.now += seconds
        self.core.tick(self.now)
        self.serve()
        asked, self.asked = self.asked, []
        return asked

    def wait(self, client: str = "waits", partition: str = "p", wait: float = 60.0) -> tuple[str, int]:
        """Its request for a segment, which cannot be served."""
        self.ask(client, m.Hello(m.VERSION, "", "", client))
        assert self.ask(client, m.SegmentRequest(100, wait, [], partition)) is None
        return self.ticket

    def writer(self, name: str, nbytes: int = 0, partition: str = "p") -> int:
        """Somebody who has a segment, and a row of so many bytes in it."""
        self.ask(name, m.Hello(m.VERSION, "", "", name))
        assert self.ask(name, m.SegmentRequest(100, 1.0, [], partition)) is not None
        segment = self.answers[self.ticket].segments[0].segment
        if nbytes:
            self.write(name, segment, nbytes)
        return segment

    def write(self, name: str, segment: int, nbytes: int) -> None:
        block = m.Block("x", segment, 0, nbytes, 1, "dense", "|u1", (nbytes,), 0)
        assert isinstance(self.ask(name, m.Commit("p", [name], [block])), m.Committed)


def test_a_segment_that_holds_nothing_is_asked_back_for_who_waits_and_comes_to_them():
    world = World(segments=3)
    segments = [world.writer(name) for name in "abc"]
    assert world.after(0.0) == []
    waiting = world.wait()
    assert world.after(0.0) == [("a", segments[:1])]
    world.ask("a", m.Seal(segments[:1], "p"))
    assert isinstance(world.answers[waiting], m.Granted)
    assert world.after(100.0) == []


def test_those_not_written_to_for_longest_are_asked_back_and_no_more_than_needed():
    world = World(segments=5)
    segments = {name: world.writer(name, 100) for name in "abcde"}
    world.write("a", segments["a"], 200)
    world.wait()
    assert world.after(0.0) == [("b", [segments["b"]]), ("c", [segments["c"]])]  # each less a page for what survives


def test_a_well_filled_segment_stays_with_its_writer_unless_it_may_go_to_disk():
    world = World(segments=2)
    segments = [world.writer(name, SIZE // 2) for name in "ab"]
    world.wait()
    assert world.after(10.0) == []
    world.ask("b", m.Clear("p", ["b"]))
    assert world.after(0.0) == [("b", segments[1:])]
    world = World(segments=2, disk=8)
    segments = [world.writer(name, SIZE // 2) for name in "ab"]
    world.wait()
    assert world.after(0.0) == [("a", segments[:1])]


def test_writers_that_stand_still_are_passed_over_twice_as_many_each_time_and_asked_again_later(monkeypatch):
    monkeypatch.setattr(recalling, "AGAIN", 4 * ROUND)
    world = World(segments=12)
    names = "abcdefghijkl"
    for name in names:
        world.writer(name)
    world.wait()
    rounds = [[name for name, _ in world.after(pause)] for pause in (0.0, ROUND, ROUND, ROUND)]
    assert rounds == [["a"], ["b", "c"], ["d", "e", "f", "g"], ["h", "i", "j", "k", "l"]]
    assert world.after(ROUND / 2) == []
    assert [name for name, _ in world.after(4 * ROUND)] == list(names)
    assert world.core.next_deadline() == pytest.approx(world.now + ROUND)


def test_nobody_is_asked_any_more_when_nobody_waits_and_who_waits_in_vain_is_told_so():
    world = World(segments=2)
    for name in "ab":
        world.writer(name)
    waiting = world.wait(wait=5.0)
    assert world.after(0.0)
    assert world.after(5.0)
    failed = world.answers[waiting]
    assert (failed.code, "2 of 2" in failed.message or f"{2 * SIZE} of {2 * SIZE}" in failed.message) == (
        "queue_full", True,
    )  # fmt: skip
    assert world.after(10.0) == []
    assert world.core.next_deadline() is None


def test_who_waits_for_the_disk_gets_back_what_is_on_the_disk():
    world = World(segments=4, disk=2)
    world.writer("memory")
    world.ask("memory", m.OpenPartition("durable", durability="journal"))
    segments = [world.writer(name, partition="durable") for name in "ab"]
    waiting = world.wait(partition="durable")
    assert world.after(0.0) == [("a", segments[:1])]
    world.ask("a", m.Seal(segments[:1], "durable"))
    assert isinstance(world.answers[waiting], m.Granted)


def test_what_others_write_cannot_be_sealed():
    world = World(segments=2)
    segment = world.writer("a")
    world.writer("b")
    assert world.ask("b", m.Seal([segment, 77])) == m.Ok()
    world.write("a", segment, 100)


async def put(client: QueueClient, key: str, nbytes: int = 100, *, wait: float = 10.0) -> float:
    """The seconds that it took."""
    began = time.monotonic()
    await client.put("p", [key], {"x": np.full((1, nbytes), len(key), np.uint8)}, wait=wait)
    return time.monotonic() - began


async def test_clients_that_wrote_once_keep_no_memory_from_one_that_writes():
    async with LocalQueue(unit_budget_bytes=8 * SIZE, segment_bytes=SIZE) as queue:
        idle = [queue.client(f"c{i}") for i in range(8)]
        for i, client in enumerate(idle):
            await put(client, f"k{i}")
        assert await put(queue.client("late"), "late") < 2.0
        assert await put(idle[0], "again") < 2.0
        keys = [*(f"k{i}" for i in range(8)), "late", "again"]
        got = (await idle[1].get("p", keys))["x"].values
        assert got[:, 0].tolist() == [len(key) for key in keys]


@pytest.mark.parametrize("where", ["before the commit", "after the commit"])
async def test_a_client_gives_a_segment_back_when_it_has_written_what_it_is_writing(monkeypatch, where):
    monkeypatch.setattr(recalling, "AGAIN", 60.0)
    async with LocalQueue(unit_budget_bytes=2 * SIZE, segment_bytes=SIZE) as queue:
        go_on, busy = asyncio.Event(), [queue.client(f"c{i}") for i in range(2)]
        for client in busy:
            monkeypatch.setattr(client, "_ask", held(client._ask, go_on, where))
        puts = [asyncio.create_task(put(client, f"k{i}")) for i, client in enumerate(busy)]
        await asyncio.sleep(0.1)
        late = asyncio.create_task(put(queue.client("late"), "late"))
        await asyncio.sleep(0.1)
        assert not late.done()
        go_on.set()
        assert await late < 2.0
        await asyncio.gather(*puts)
        assert set((await busy[0].list())["p"]) == {"k0", "k1", "late"}


async def test_a_segment_that_came_as_its_put_was_cancelled_is_given_back(monkeypatch):
    async with LocalQueue(unit_budget_bytes=2 * SIZE, segment_bytes=SIZE) as queue:
        empty, full, hasty = (queue.client(name) for name in ("empty", "full", "hasty"))
        await put(full, "full", SIZE // 2)
        await put(empty, "empty")
        await empty.clear("p", ["empty"])
        transport: Any = hasty._transport
        deliver, granted = transport.deliver, []

        def cancelling(response: m.Response) -> None:
            deliver(response)
            if isinstance(response.body, m.Granted):
                granted.append(waiting.cancel())

        monkeypatch.setattr(transport, "deliver", cancelling)
        waiting = asyncio.create_task(put(hasty, "hasty"))
        await asyncio.wait([waiting])
        assert granted == [True]
        assert waiting.cancelled()
        assert await put(empty, "again") < 2.0


def held(ask: Any, go_on: asyncio.Event, where: str) -> Any:
    """A client's requests, of which commits wait before they are sent, or before their answer arrives."""

    async def asking(body: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(body, m.Commit) and where == "before the commit":
            await go_on.wait()
        reply = await ask(body, *arguments, **options)
        if isinstance(body, m.Commit):
            await go_on.wait()
        return reply

    return asking


@contextlib.contextmanager
def stopped_writer(address: dict[str, str]):
    """A process that has put one row, and stands still."""
    program = f"""
        import sys, numpy as np
        from transfer_queue.clients.sync_client import SyncQueueClient
        client = SyncQueueClient({address!r}, "stopped")
        client.put("p", ["stopped"], {{"x": np.full((1, 100), 7, np.uint8)}})
        print("done", flush=True)
        sys.stdin.readline()
        client.put("p", ["later"], {{"x": np.full((1, 100), 8, np.uint8)}})
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
            os.kill(process.pid, signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def test_idle_clients_in_processes_one_of_them_stopped_hold_up_a_put_for_less_than_two_seconds(tmp_path):
    service = QueueService(
        tmp_path / "q", storage_dir=tmp_path, units=1, unit_budget_bytes=10 * SIZE, segment_bytes=SIZE,
        spill_budget_bytes=0,
    )  # fmt: skip
    with service, stopped_writer(service.address) as process, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(SyncQueueClient(service.address, f"c{i}")) for i in range(10)]
        row = {"x": np.full((1, 100), 7, np.uint8)}
        for i in range(9):
            clients[i].put("p", [f"k{i}"], row)
        assert clients[9].stats().units[0].used == 10 * SIZE
        began = time.monotonic()
        clients[9].put("p", ["late"], row, wait=10.0)
        assert time.monotonic() - began < 2.0
        os.kill(process.pid, signal.SIGCONT)
        process.communicate("\n", timeout=20)
        assert process.returncode == 0
        got = clients[0].get("p", ["stopped", *(f"k{i}" for i in range(9)), "late", "later"])["x"].values
        assert got[:, 0].tolist() == [7] * 11 + [8]
