"""Checkpoints and who else is at work: other loads, clients that die, and what a directory may be."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer_queue import checkpoint
from transfer_queue.checkpoint import loading
from transfer_queue.client import QueueClient
from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.loads import Loads
from transfer_queue.errors import Conflict, Corrupt, Invalid, NotFound
from transfer_queue.keys import LOADING, UNNAMED
from transfer_queue.ledger import Ledger
from transfer_queue.local import LocalQueue
from transfer_queue.net import messages as m
from transfer_queue.net.bounds import check_request
from transfer_queue.storage.journal import MemoryJournal

ROWS = 1500


@pytest.fixture
async def queue():
    async with LocalQueue() as queue:
        yield queue


@pytest.fixture
async def client(queue) -> QueueClient:
    return queue.client("mine")


@pytest.fixture
async def saved(client, tmp_path) -> Path:
    """A checkpoint of three pages."""
    await client.put("p", [f"k{i}" for i in range(ROWS)], {"x": np.arange(ROWS)}, tags=[{"i": i} for i in range(ROWS)])
    await checkpoint.save(client, tmp_path / "c")
    return tmp_path / "c"


async def state(client: QueueClient) -> Any:
    listed = (await client.list("p"))["p"]
    return listed, (await client.get("p", list(listed), ["x"]))["x"].values.tolist()


async def hidden(client: QueueClient) -> list[str]:
    return [name for name in (await client.stats()).partitions if name.startswith(UNNAMED)]


def at_find(client: QueueClient, number: int, act: Any) -> None:
    """`act()` is awaited before the client's find of that number."""
    find, count = client.find, 0

    async def counting(*args: Any, **kwargs: Any) -> m.Rows:
        nonlocal count
        count += 1
        if count == number:
            await act()
        return await find(*args, **kwargs)

    client.find = counting


# --- several loads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [1, 2, 3])
async def test_a_load_in_the_middle_of_another_one_disturbs_neither(queue, client, saved, when):
    before, other = await state(client), queue.client("other")
    await client.clear_partition("p")
    during: list[Any] = []

    async def load() -> None:
        await checkpoint.load(other, saved)
        during.append(await state(other))

    at_find(client, when, load)
    await checkpoint.load(client, saved)
    assert during == [before]
    assert await state(client) == before
    assert await hidden(client) == []


async def test_two_loads_of_one_client_at_once_bring_all_rows_back(client, saved):
    before = await state(client)
    await asyncio.gather(checkpoint.load(client, saved), checkpoint.load(client, saved))
    assert await state(client) == before
    assert await hidden(client) == []


@pytest.mark.parametrize("when", [1, 2, 3])
async def test_a_load_whose_rows_are_cleared_on_the_way_changes_nothing(queue, client, saved, when):
    await client.clear("p", ["k7"])
    before, other = await state(client), queue.client("other")

    async def clear() -> None:
        for name in await hidden(other):
            await other.clear_partition(name)

    at_find(client, when, clear)
    with pytest.raises(Conflict, match="load again"):
        await checkpoint.load(client, saved)
    assert await state(client) == before
    assert await hidden(client) == []


async def test_a_load_that_lost_a_page_is_refused_when_it_ends(queue, client, saved):
    other, adopt = queue.client("other"), client.adopt

    async def adopted(*args: Any) -> None:
        (name,) = await hidden(other)
        await other.clear(name, ["k1000"])
        await adopt(*args)

    client.adopt = adopted
    with pytest.raises(Conflict, match=f"of the {ROWS} rows put for partition 'p' {ROWS - 1} are there: .*load again"):
        await checkpoint.load(client, saved)


async def test_what_a_load_has_put_goes_with_its_client(queue, client, saved):
    before, dying = await state(client), queue.client("dying")

    async def die(*_: Any) -> None:
        assert len(await hidden(client)) == 1
        await dying.close()
        raise asyncio.CancelledError

    dying.adopt = die
    with pytest.raises(asyncio.CancelledError):
        await checkpoint.load(dying, saved)
    assert await hidden(client) == []
    assert await state(client) == before


async def test_a_load_holds_no_memory_when_it_has_ended(client, saved):
    """An open segment of 8 MiB each, as long as nobody needs it."""
    used = []
    for _ in range(3):
        await checkpoint.load(client, saved)
        used.append((await client.stats()).units[0].used)
    assert used[0] == used[-1]


@pytest.mark.parametrize("changed", ["p", "q"])
async def test_a_checkpoint_that_is_saved_anew_while_it_is_loaded_is_loaded_as_a_whole(queue, client, saved, changed):
    """Of the first partition a page is read, of the second none: what was saved first, or what was saved last."""
    other = queue.client("other")
    await client.put("q", ["k"], {"x": np.arange(1)})
    await checkpoint.save(client, saved)

    async def save() -> None:
        await other.put("p", ["k3"], {"x": np.array([-1])})
        await other.put(changed, ["new"], {"x": np.array([-1])})
        await checkpoint.save(other, saved)

    at_find(client, 1, save)
    await checkpoint.load(client, saved)
    listed, values = await state(client)
    assert (values[3], len(listed)) == ((-1, ROWS) if changed == "q" else (3, ROWS))
    assert list((await client.list("q"))["q"]) == (["k", "new"] if changed == "q" else ["k"])
    assert await hidden(client) == []


async def test_a_checkpoint_that_is_saved_all_the_time_is_refused_in_the_end(queue, client, saved, monkeypatch):
    other = queue.client("other")

    async def filled(*_: Any) -> None:
        await other.put("p", ["k3"], {"x": np.array([len(saves)])})
        saves.append(await checkpoint.save(other, saved))
        raise Corrupt("it does not match its digest")

    saves: list[None] = []
    monkeypatch.setattr(loading, "_fill", filled)
    with pytest.raises(Conflict, match="saved anew 5 times while it was loaded"):
        await checkpoint.load(client, saved)
    assert len(saves) == loading.TRIES


# --- whose a partition is that is being loaded ----------------------------------------------------------------------


def test_a_partition_is_cleared_once_after_its_client_left():
    loads = Loads(after=10.0)
    loads.filled("a", "one")
    loads.filled("b", "one")
    loads.filled("a", "two")
    assert loads.left("one") == ["b"]
    assert loads.left("one") == []
    loads.ended(["a", "never"])
    assert loads.left("two") == []


def test_what_was_there_before_a_restart_is_cleared_unless_somebody_goes_on_with_it():
    loads = Loads(after=10.0)
    loads.found(["p", f"{LOADING}a", f"{LOADING}b", f"{LOADING}c"], 5.0)
    loads.filled(f"{LOADING}a", "one")
    loads.ended([f"{LOADING}b"])
    assert (loads.next_due(), loads.due(14.9), loads.due(15.0)) == (15.0, [], [f"{LOADING}c"])
    assert (loads.next_due(), loads.left("one")) == (None, [f"{LOADING}a"])


class Controller:
    """A core without sockets; `path` of its journal."""

    def __init__(self, path: Path | None = None) -> None:
        self.replies: list[m.Response] = []
        send = lambda _, response: self.replies.append(response)  # noqa: E731
        if path is None:
            self.core = ControllerCore(Ledger(), send=send, journal=MemoryJournal())
        else:
            self.core = ControllerCore.recover(path, send=send, now=0.0, run="r")
        self.requests = 0

    def ask(self, client: str, body: Any) -> Any:
        self.requests += 1
        self.core.handle(client, m.Request(self.requests, body), 0.0)
        return self.replies[-1].body

    def join(self, *clients: str) -> Controller:
        for client in clients:
            self.ask(client, m.Hello(m.VERSION, "r", "", client))
        return self

    def partitions(self) -> list[str]:
        return list(self.core.ledger.partitions)


def test_the_rows_of_a_dead_loader_go_at_once_and_those_of_others_stay():
    controller = Controller().join("a", "b")
    for client in ("a", "b"):
        controller.ask(client, m.Commit(f"{LOADING}{client}", ["k"]))
        controller.ask(client, m.Commit(f"mine-{client}", ["k"]))
    controller.core.client_gone("a", 1.0)
    assert controller.partitions() == ["mine-a", f"{LOADING}b", "mine-b"]
    assert controller.ask("b", m.AdoptPartitions({f"{LOADING}b": "p"}, {}, {f"{LOADING}b": 1})) == m.Ok()
    controller.core.client_gone("b", 1.0)
    assert controller.partitions() == ["mine-a", "mine-b", "p"]


def test_a_load_goes_on_after_a_restart_and_one_that_nobody_goes_on_with_is_cleared(tmp_path):
    controller = Controller(tmp_path / "journal").join("a", "b")
    for client in ("a", "b"):
        controller.ask(client, m.Commit(f"{LOADING}{client}", ["k"]))
    controller.core.close()
    again = Controller(tmp_path / "journal").join("a")
    again.ask("a", m.Commit(f"{LOADING}a", ["l"]))
    again.core.tick(again.core.next_deadline() or 0.0)
    assert again.partitions() == [f"{LOADING}a"]
    again.core.close()


def test_rows_are_counted_when_they_are_adopted():
    ledger = Ledger()
    ledger.apply(m.Commit("staged", ["a", "b"]), 0.0)
    for rows, error in (({"staged": 3}, Conflict), ({"staged": 1}, Conflict), ({"other": 2}, NotFound)):
        with pytest.raises(error):
            ledger.apply(m.AdoptPartitions({"staged": "p"}, {}, rows), 1.0)
    ledger.apply(m.AdoptPartitions({"staged": "p"}, {}, {"staged": 2}), 1.0)
    assert list(ledger.partitions) == ["p"]


def test_a_request_may_name_as_many_serials_as_a_frame_holds():
    """A million rows of a partition, each consumed."""
    for count, fits in ((1 << 20, True), (9 << 20, False)):
        consumed = {f"{LOADING}a": {"t": bytes(8 * count)}}
        for body in (m.AdoptPartitions({f"{LOADING}a": "p"}, consumed), m.Find("p", rows=bytes(8 * count))):
            with nullcontext() if fits else pytest.raises(Invalid, match="serials: send less at once"):
                check_request(body)
