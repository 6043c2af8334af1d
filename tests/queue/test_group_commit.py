"""Answers that must be on the disk wait for it; all others do not, and nothing is told too early."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.queue.test_durability import served
from transfer_queue.client import QueueClient
from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.unsynced import Unsynced
from transfer_queue.ledger import Ledger
from transfer_queue.net import messages as m
from transfer_queue.storage.journal import MemoryJournal


def test_a_partition_waits_for_its_own_last_record_and_all_together_for_the_last_of_all() -> None:
    unsynced = Unsynced()
    assert unsynced.needed() == unsynced.needed("a") == 0
    unsynced.note(3, "a")
    unsynced.note(5, "b")
    assert (unsynced.needed("a"), unsynced.needed("b"), unsynced.needed("other"), unsynced.needed()) == (3, 5, 0, 5)
    unsynced.covered(4)
    assert (unsynced.needed("a"), unsynced.needed("b"), unsynced.needed()) == (0, 5, 5)
    unsynced.note(6, None)
    assert (unsynced.needed("other"), unsynced.needed("a")) == (6, 6), "it may have changed any"
    unsynced.covered(6)
    assert unsynced.needed() == unsynced.needed("a") == 0


class Held:
    """A core whose answers are noted, with the record that each must wait for; 0: sent at once."""

    def __init__(self) -> None:
        self.told: list[tuple[int, m.Response]] = []
        send = lambda _, response: self.told.append((0, response))  # noqa: E731
        self.core = ControllerCore(Ledger(), send=send, journal=MemoryJournal())
        self.core.hold = lambda record, _, response: self.told.append((record, response))
        self._requests = 0
        self.ask(m.Hello(m.VERSION, "r", "", "c"))

    def ask(self, body: m.Mutation | m.Query) -> int:
        """The record that the answer waits for."""
        self._requests += 1
        self.core.handle("c", m.Request(self._requests, body), 0.0)
        return next(record for record, response in self.told if response.id == self._requests)


def test_what_follows_a_durable_change_is_held_and_other_partitions_go_on() -> None:
    held = Held()
    assert held.ask(m.OpenPartition("m", durability="memory")) == 0
    assert held.ask(m.OpenPartition("j", durability="journal")) == 2
    assert held.ask(m.Commit("m", ["k"], tags=[{}])) == 0
    assert held.ask(m.Commit("j", ["k"], tags=[{}])) == 4
    assert held.ask(m.ListKeys("m")) == 0
    assert held.ask(m.ListKeys("j")) == held.ask(m.Stats()) == held.ask(m.ListKeys()) == 4
    assert held.ask(m.ClearPartition("j")) == 5, "though it is no durable partition any more"
    held.core.synced(4)
    assert held.ask(m.ListKeys()) == 5
    held.core.synced(5)
    assert held.ask(m.ListKeys()) == held.ask(m.Commit("j", ["new"], tags=[{}])) == 0


def test_an_answer_that_is_asked_for_again_waits_as_the_first_one() -> None:
    held = Held()
    held.ask(m.OpenPartition("j", durability="journal"))
    held.told.clear()
    held.core.handle("c", m.Request(held._requests, m.OpenPartition("j", durability="journal")), 0.0)
    assert [record for record, _ in held.told] == [1]


class SlowDisk:
    """Syncs of the journal last until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go, self.count = threading.Event(), threading.Event(), 0
        self._real = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/journal"):
            self.count += 1
            self.begun.set()
            assert self.go.wait(20)
        self._real(fd)


async def test_while_the_disk_is_slow_memory_partitions_are_served_and_durable_ones_wait(tmp_path: Path, monkeypatch):
    async with served(tmp_path) as address:
        client = await QueueClient.connect(address, name="c")
        await client.open_partition("j", tasks=[], durability="journal")
        disk = SlowDisk(monkeypatch)
        first = asyncio.create_task(client.put("j", ["a"], {}, tags=[{"n": 1}]))
        assert await asyncio.to_thread(disk.begun.wait, 10)
        await client.put("m", ["k"], {"x": np.arange(3)[None]}, wait=5.0)
        assert (await client.get("m", ["k"]))["x"].values.tolist() == [[0, 1, 2]]
        late = [asyncio.create_task(client.put("j", [f"b{i}"], {}, tags=[{"n": i}])) for i in range(8)]
        listing = asyncio.create_task(client.list("j"))
        await client.put("m", ["later"], {}, tags=[{}])
        assert not any(task.done() for task in (first, listing, *late)), "told before it was on the disk"
        disk.go.set()
        await asyncio.wait_for(asyncio.gather(first, listing, *late), 10)
        assert set(listing.result()["j"]) <= {"a", *(f"b{i}" for i in range(8))}
        assert disk.count <= 3, "one sync for the first, one or two for all that came meanwhile"
        await client.close()


async def test_a_snapshot_waits_for_the_sync_under_way_and_forks_with_one_thread(tmp_path: Path, monkeypatch):
    from transfer_queue.storage import history

    threads: list[int] = []
    fork = os.fork
    monkeypatch.setattr(history, "TAIL", 0.001)
    monkeypatch.setattr(history.os, "fork", lambda: threads.append(journal_threads()) or fork())
    async with served(tmp_path) as address:
        client = await QueueClient.connect(address, name="c")
        await client.open_partition("j", tasks=[], durability="journal")
        for at in range(0, 400, 8):
            await asyncio.gather(*(client.put("j", [f"k{i}"], {}, tags=[{"n": i}]) for i in range(at, at + 8)))
        assert set((await client.list("j"))["j"]) == {f"k{i}" for i in range(400)}
        await client.close()
    assert threads
    assert set(threads) == {0}


def journal_threads() -> int:
    return sum(thread.name.startswith("journal") for thread in threading.enumerate())
