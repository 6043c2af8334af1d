"""Serials and what tasks consume of them, without sockets: the ledger's tables, and fetches that wait in the core."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer_queue.controller import fetching
from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.fetching import Fetching
from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.ledger import Ledger
from transfer_queue.ledger.consumption import Consumption
from transfer_queue.ledger.order import RowOrder, Serials
from transfer_queue.net import messages as m
from transfer_queue.net.codec import decode_response, encode
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
)


def packed(*serials: int) -> bytes:
    return np.asarray(serials, "<i8").tobytes()


def unpacked(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i8").tolist()


# --- the tables ------------------------------------------------------------------------------------------------------


def test_serials_name_rows_for_ever_while_row_ids_are_used_again():
    """Against a plain dict, with random arrivals, ends and questions."""
    seed = random.randrange(1 << 32)
    rng, order, serials = random.Random(seed), RowOrder(Serials()), 0
    alive: dict[int, int] = {}
    free = list(range(40))
    for _ in range(3000):
        if free and rng.random() < 0.5:
            row = free.pop(rng.randrange(len(free)))
            order.add([row])
            alive[serials] = row
            serials += 1
        elif alive:
            gone = rng.sample(sorted(alive), rng.randint(1, min(5, len(alive))))
            order.erase(np.asarray([alive[serial] for serial in gone], np.int64))
            free += [alive.pop(serial) for serial in gone]
        after, count = rng.randint(-1, serials), rng.choice([0, 1, 3, 100])
        expected = [serial for serial in sorted(alive) if serial > after][: count or None]
        found, rows = order.after(after, count)
        assert found.tolist() == expected, f"seed {seed}"
        assert rows.tolist() == [alive[serial] for serial in expected], f"seed {seed}"
        asked = [rng.randint(0, max(1, serials)) for _ in range(4)]
        assert order.find(np.asarray(asked, np.int64)).tolist() == [alive.get(serial, -1) for serial in asked]


def test_a_serial_that_is_gone_is_an_error_that_names_it():
    order = RowOrder(Serials())
    order.add([0])
    with pytest.raises(StorageKeyNotFoundError, match=r"rows \[7\] of partition 'p' \(1 of 2"):
        order.require(np.asarray([0, 7]), "p")


def test_a_row_id_that_is_used_again_is_not_consumed():
    order, consumption = RowOrder(Serials()), Consumption()
    order.add([0, 1])
    consumption.take("t", *order.after(-1))
    order.erase(np.asarray([1]))
    order.add([1])
    assert consumption.unconsumed(order, "t")[0].tolist() == [2]
    assert consumption.unconsumed(order, "other")[0].tolist() == [0, 2]
    consumption.reset(["t"])
    assert consumption.unconsumed(order, "t")[0].tolist() == [0, 2]


def test_answers_whose_rows_are_gone_are_forgotten_some_time():
    order, consumption = RowOrder(Serials()), Consumption()
    for batch in range(300):
        order.add([0])
        serials, rows = order.after(-1)
        consumption.remember("t", {f"{batch}/0": serials}, order)
        order.erase(rows)
    assert len(consumption.remembered["t"]) < 130
    order.add([0])
    consumption.remember("t", {"last": order.after(-1)[0]}, order)
    assert consumption.recall("t", "last") is not None
    assert consumption.unconsumed(order, "t")[0].tolist() == [300]
    order.erase(np.asarray([0]))
    assert consumption.unconsumed(order, "t")[0].tolist() == []


def test_rows_are_described_with_what_they_have_and_where_it_lies():
    ledger = Ledger()
    dense, ragged = (
        m.Block("d", 1, 0, 24, 3, "dense", "<f4", (2,), 0),
        m.Block("r", 1, 64, 99, 1, "ragged", "<i8", (), 0),
    )
    ledger.apply(m.Commit("p", ["a", "b", "c"], [dense], [{"i": i} for i in range(3)]), 0.0)
    ledger.apply(m.Commit("p", ["b"], [ragged]), 0.0)
    found = ledger.find(m.Find("p", keys=["c", "zz", "b"], located=True))
    assert (unpacked(found.rows), found.keys) == ([2, 1], ["c", "b"])
    assert found.schema == [m.FieldSchema("d", "dense", "<f4", (2,)), m.FieldSchema("r", "ragged", "<i8", ())]
    assert [list(have) for have in found.have] == [[1, 1], [0, 1]]
    located = found.located
    assert located is not None
    places = {place.field: np.frombuffer(place.block, "<i4").tolist() for place in located.places}
    assert [[located.blocks[b].field if b >= 0 else "" for b in places[field]] for field in "dr"] == [
        ["d"] * 2,
        ["", "r"],
    ]
    asked = ledger.find(m.Find("p", fields=["r", "none"]))
    assert [(one.field, one.dtype) for one in asked.schema] == [("r", "<i8"), ("none", "")]
    assert ledger.find(m.Find("p", keys=["a"])).schema == [m.FieldSchema("d", "dense", "<f4", (2,))]


# --- fetches ---------------------------------------------------------------------------------------------------------


class World:
    """A core with clients; `now` is its clock."""

    def __init__(self, directory: Path, sampler: BaseSampler | None = None, *, polling: bool = False) -> None:
        self.directory, self.make = directory, lambda: Fetching(sampler, polling=polling)
        self.now, self.requests = 0.0, 0
        self.answers: dict[tuple[str, int], Any] = {}
        self.start()

    def start(self) -> None:
        self.core = ControllerCore.recover(
            self.directory / "journal", send=self.take, now=self.now, run="r", fetching=self.make()
        )
        for client in ("producer", "consumer", "other"):
            self.core.handle(client, m.Request(0, m.Hello(m.VERSION, "r", "", client)), self.now)

    def restart(self) -> None:
        self.core.close()
        self.now += 1
        self.start()

    def take(self, client: str, response: m.Response) -> None:
        self.answers[client, response.id] = decode_response(encode(response)).body

    def ask(self, body: Any, client: str = "consumer") -> Any:
        """The answer; None while it waits."""
        self.requests += 1
        self.ticket = (client, self.requests)
        self.core.handle(client, m.Request(self.requests, body), self.now)
        return self.answers.get(self.ticket)

    def put(self, *keys: str, tags: list[Any] | None = None) -> Any:
        """Rows that have no fields: what is fetched without asking for any is ready."""
        return self.ask(m.Commit("p", list(keys), tags=tags or [{}] * len(keys)), "producer")

    def fetch(self, count: int, task: str = "t", client: str = "consumer", **more: Any) -> Any:
        return self.ask(m.Fetch("p", task, [], count, wait=more.pop("wait", 10.0), **more), client)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_rows_are_consumed_once_per_task_in_the_order_in_which_they_came(world):
    world.put("a", "b", "c")
    assert world.fetch(2).keys == ["a", "b"]
    world.put("d")
    assert world.fetch(2).keys == ["c", "d"]
    assert world.fetch(4, "another").keys == ["a", "b", "c", "d"]


def test_a_fetch_waits_for_its_rows_and_is_woken_by_the_last(world):
    assert world.fetch(2) is None
    ticket = world.ticket
    world.put("a")
    assert ticket not in world.answers
    world.put("b")
    assert world.answers[ticket].keys == ["a", "b"]


def test_a_fetch_that_waited_in_vain_says_what_there_is(world):
    world.put("a")
    assert world.fetch(2, wait=5.0) is None
    world.now += 5.0
    world.core.tick(world.now)
    failed = world.answers[world.ticket]
    assert failed.code == "deadline"
    assert "of 'none' with []: nobody has put anything" in world.ask(m.Fetch("none", "t", [], 1)).message
    assert "(partitions that exist: 'p')" in world.ask(m.Fetch("none", "t", [], 1)).message
    assert "task 't' waited 5.0 s for 2 rows of 'p'" in failed.message
    assert "1 of its 1 rows are not consumed, 1 of them have all the fields" in failed.message


def test_with_polling_too_few_rows_are_an_empty_answer_unless_a_wait_is_given(tmp_path):
    world = World(tmp_path, polling=True)
    assert world.fetch(1, poll=True) == m.Rows()
    assert world.fetch(1, wait=5.0) is None


def test_a_fetch_may_end_when_all_rows_are_consumed(world):
    assert world.fetch(1, drained=True) is None, "there is nothing that could be consumed yet"
    first = world.ticket
    assert world.fetch(1, client="other", drained=True) is None
    second = world.ticket
    world.put("a")
    assert world.answers[first].keys == ["a"]
    assert world.answers[second] == m.Rows()


def test_a_restarted_controller_knows_what_was_consumed_whatever_the_sampler_is_now(tmp_path):
    world = World(tmp_path, GRPOGroupNSampler(2))
    world.put("a", "b", "c", "d", "e")
    assert world.fetch(2).keys == ["a", "b"]
    world.make = Fetching
    world.restart()
    assert world.fetch(3).keys == ["c", "d", "e"]
    again = world.ask(m.Find("p", fields=[], task="t"))
    assert (unpacked(again.rows), list(again.consumed)) == ([0, 1, 2, 3, 4], [1] * 5)


def test_a_repeated_request_gets_the_same_rows_also_after_a_restart(tmp_path):
    world = World(tmp_path)
    world.put("a", "b")
    first = world.fetch(1)
    (client, request), body = world.ticket, m.Fetch("p", "t", [], 1, wait=10.0)
    world.restart()
    world.core.handle(client, m.Request(request, body), world.now)
    assert world.answers[client, request].keys == first.keys == ["a"]


def test_what_ranks_are_still_to_get_survives_a_restart(tmp_path):
    world = World(tmp_path, RankAwareSampler())
    world.put("a", "b", "c")
    at = {"dp_rank": 0, "batch_index": 0}
    assert world.fetch(2, sampling=at).keys == ["a", "b"]
    world.make = lambda: Fetching(RankAwareSampler())
    world.restart()
    assert world.fetch(2, sampling=at, client="other").keys == ["a", "b"]
    assert world.fetch(1, sampling=at | {"dp_rank": 1}).keys == ["c"]


def test_consumption_is_reset_for_one_task_or_all(world):
    world.put("a")
    for task in ("t", "u"):
        world.fetch(1, task)
    world.ask(m.ResetConsumption("p", "t"))
    assert world.fetch(1, "t").keys == ["a"]
    assert world.fetch(1, "u", wait=0.0).code == "deadline"
    world.ask(m.ResetConsumption("p"))
    assert world.fetch(1, "u").keys == ["a"]


def test_a_write_to_a_row_that_was_put_anew_is_refused_and_changes_nothing(world):
    world.put("a")
    old = world.ask(m.Find("p", keys=["a"]))
    world.ask(m.Clear("p", ["a"]))
    world.put("a", tags=[{"new": True}])
    failed = world.ask(m.Commit("p", ["a"], tags=[{"late": True}], rows=old.rows))
    assert failed.code == "rows_gone"
    assert world.ask(m.Find("p", rows=old.rows)).code == "rows_gone"
    world.ask(m.Clear("p", [], rows=old.rows))
    assert world.ask(m.ListKeys("p")).partitions["p"] == {"a": {"new": True}}


def test_a_partition_is_cleared_with_what_was_consumed_of_it(world):
    world.put("a")
    world.fetch(1)
    assert world.ask(m.ClearPartition("p")) == m.Ok()
    assert world.ask(m.ListKeys(None)).partitions == {}
    assert world.ask(m.ClearPartition("p")).code == "not_found"
    world.put("b")
    assert world.fetch(1).keys == ["b"]


def test_partitions_that_were_filled_under_other_names_take_their_places_at_once(world):
    world.put("old")
    world.fetch(1)
    world.ask(m.Commit("\0load.0123abcd.0", ["a", "b"], tags=[{"i": 0}, {}]))
    assert list(world.ask(m.ListKeys(None)).partitions) == ["p"], "nobody sees what is under way"
    staged = world.ask(m.Find("\0load.0123abcd.0", fields=[]))
    assert (
        world.ask(m.AdoptPartitions({"\0load.0123abcd.0": "p"}, {"\0load.0123abcd.0": {"t": staged.rows[:8]}}))
        == m.Ok()
    )
    for _ in range(2):
        assert world.ask(m.ListKeys(None)).partitions == {"p": {"a": {"i": 0}, "b": {}}}
        found = world.ask(m.Find("p", fields=[], task="t"))
        assert (found.rows, list(found.consumed)) == (staged.rows, [1, 0])
        world.restart()
    assert world.fetch(1).keys == ["b"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (m.AdoptPartitions({"none": "p"}), "not_found"),
        (m.AdoptPartitions({"p": "r", "q": "r"}), "invalid"),
        (m.AdoptPartitions({"p": ""}), "invalid"),
        (m.AdoptPartitions({"p": "groups"}), "conflict"),
        (m.AdoptPartitions({"groups": "r"}), "conflict"),
        (m.AdoptPartitions({"p": "r"}, {"q": {"t": b""}}), "not_found"),
        (m.AdoptPartitions({"p": "r"}, {"p": {"t": b"1"}}), "invalid"),
        (m.AdoptPartitions({"p": "p"}), "invalid"),
        (m.AdoptPartitions({"p": "q", "q": "p"}), "invalid"),
        (m.ClearPartition("groups"), "conflict"),
    ],
)
def test_a_partition_that_cannot_be_adopted_or_cleared_stays_as_it_is(world, body, code):
    world.put("a")
    world.ask(m.Commit("q", ["b"], tags=[{}]))
    world.ask(m.OpenPartition("groups", [m.TaskSpec("train", "rows")]))
    world.ask(m.Admit("groups", [m.GroupSpec("u", 1, 0)]))
    before = world.core.ledger.fingerprint()
    assert world.ask(body).code == code
    assert world.core.ledger.fingerprint() == before


def test_pages_of_a_partition_have_each_visible_row_once(world):
    """Rows of groups that were trained are hidden; a page that has only such is not the last."""
    world.ask(m.OpenPartition("p", [m.TaskSpec("train", "rows")]))
    for i in range(6):
        world.ask(m.Admit("p", [m.GroupSpec(f"u{i}", 1, i)]))
        world.ask(m.Commit("p", [f"u{i}_0_0"], closes=[m.SessionClose(f"u{i}", 0, [f"u{i}_0_0"])]))
    world.put("plain")
    lease = world.ask(m.Lease("p", "train", "consumer", groups=4))
    world.ask(m.Ack("p", lease.token, [group.uid for group in lease.groups], step=1))
    seen: list[str] = []
    after = -1
    while (page := world.ask(m.Find("p", fields=[], after=after, count=3))).keys:
        seen += page.keys
        after = unpacked(page.rows)[-1]
    assert sorted(seen) == ["plain", "u4", "u4_0_0", "u5", "u5_0_0"]
    assert world.ask(m.Find("p", fields=[])).keys == seen
    assert world.fetch(1).keys == ["plain"], "rows of groups are leased, not fetched"


def test_a_fetch_that_is_far_from_enough_is_not_tried_at_each_put(world, monkeypatch):
    tried = []
    ready = fetching.ready
    monkeypatch.setattr(fetching, "ready", lambda *args: tried.append(1) or ready(*args))
    assert world.fetch(100) is None
    ticket = world.ticket
    for i in range(100):
        world.put(f"k{i}")
    assert len(world.answers[ticket].keys) == 100
    assert len(tried) == 2


def journaled(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_ranks_are_dealt_rows_by_the_tag_that_says_their_length(tmp_path):
    world = World(tmp_path, SeqlenBalancedSampler(2, dp_size=2))
    world.put(*"abcd", tags=[{"total_lengths": n} for n in (90, 10, 60, 40)])
    shares = [world.fetch(2, sampling={"dp_rank": rank, "batch_index": 0}).keys for rank in (0, 1)]
    assert sorted(sorted(share) for share in shares) == [["a", "b"], ["c", "d"]]
    assert world.ask(m.Find("p", fields=[], task="t")).consumed == b"\1" * 4
    failed = world.fetch(2, sampling={"dp_rank": 0})
    assert "needs partition_id, task_name, dp_rank, batch_index" in failed.message


def test_a_priority_that_was_replaced_counts_in_the_next_fetch(tmp_path):
    world = World(tmp_path, PrioritySampler())
    world.put(*"abcd", tags=[{"priority": n} for n in (1, 4, 3, 2)])
    assert world.fetch(1).keys == ["b"]
    world.put("a", tags=[{"priority": 5}])
    world.ask(m.Clear("p", ["c"]))
    world.put("c", tags=[{"priority": 0}])
    assert [world.fetch(1).keys for _ in range(3)] == [["a"], ["d"], ["c"]]
    world.put("e", tags=[{"priority": "high"}])
    assert "high" in world.fetch(1).message


class ByTag(BaseSampler):
    """As a user of TransferQueue writes it: over a list, with the partition's custom_meta."""

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, partition: Any, **kwargs: Any) -> Any:
        assert (type(ready_indexes), partition.partition_id) == (list, "p")
        assert list(partition.custom_meta) == ready_indexes
        assert 99 not in partition.custom_meta
        chosen = [row for row in ready_indexes if partition.custom_meta[row].get("good")][:batch_size]
        return (chosen, ready_indexes) if len(chosen) == batch_size and len(partition.custom_meta) > 2 else ([], [])


def test_a_sampler_may_go_by_tags_and_consume_more_than_it_samples(tmp_path):
    world = World(tmp_path, ByTag())
    world.put("a", "b", tags=[{}, {"good": True}])
    assert world.fetch(2) is None
    ticket = world.ticket
    world.put("c", tags=[{"good": True}])
    assert world.answers[ticket].keys == ["b", "c"]
    assert world.ask(m.Find("p", fields=[], task="t")).consumed == b"\1" * 3


def test_the_oldest_whole_groups_are_found_far_behind_broken_ones(tmp_path):
    """The sampler is shown more and more of the rows until it finds some."""
    world = World(tmp_path, GRPOGroupNSampler(2))
    world.put(*(f"k{i}" for i in range(40_000)))
    world.ask(m.Clear("p", [f"k{i}" for i in range(1, 36_000, 2)]))
    assert world.fetch(2).keys == ["k36000", "k36001"]


class Wrong(BaseSampler):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (KeyError("x"), "sampler Wrong: KeyError: 'x'"),
        (None, "returned None"),
        ([1, 2, 3], "returned"),
        (([7], [7]), "not ready"),
        (([0, 0], [0]), "a row twice"),
        (([0], [5]), "not ready"),
    ],
)
def test_a_sampler_that_misbehaves_fails_the_fetch_and_consumes_nothing(tmp_path, answer, match):
    world = World(tmp_path, Wrong(answer))
    world.put("a", "b")
    size = journaled(tmp_path)
    failed = world.fetch(1)
    assert (failed.code, match in failed.message) == ("invalid", True), failed.message
    assert journaled(tmp_path) == size


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (m.Fetch("p", "t", [], 0), "batch_size=0"),
        (m.Fetch("p", "", [], 1), "task_name"),
        (m.Find("p", rows=b"123"), "8 bytes each"),
        (m.Consume("p", "t", [], b"", b""), "the controller's own"),
        (m.Commit("p", ["a", "b"], tags=[{}, {}], rows=packed(0)), "do not name the same rows"),
    ],
)
def test_malformed_requests_are_refused(world, body, match):
    world.put("a", "b")
    failed = world.ask(body)
    assert (failed.code, match in failed.message) == ("invalid", True), failed.message
