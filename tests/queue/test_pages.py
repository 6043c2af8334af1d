"""Long answers come in parts: others are served in between, and what happens meanwhile is not lost."""

from __future__ import annotations

import asyncio

import pytest

from transfer_queue.clients.async_client import QueueClient
from transfer_queue.clients.row_verbs import CLEARED_AT_ONCE
from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.pages import GROUPS, PARTITIONS, ROWS
from transfer_queue.errors import Invalid
from transfer_queue.ledger import Ledger
from transfer_queue.ledger.tags import MAX_TAG, MAX_TAGS, PAGE_TAGS
from transfer_queue.net import messages as m
from transfer_queue.net.codec import decode_response, encode
from transfer_queue.net.waiters import Waiters
from transfer_queue.storage.journal import MemoryJournal

COUNT = 2 * ROWS + 100


class Paged:
    """A core that answers in parts, and what a client makes of its answers."""

    def __init__(self) -> None:
        self.core = ControllerCore(Ledger(), send=self._deliver, journal=MemoryJournal(), paged=True)
        self.waiters = Waiters("reader", "the core", str)
        self.ask(m.Hello(m.VERSION, "", "", "reader"))

    def ask(self, body: m.Mutation | m.Query) -> asyncio.Future[m.Reply]:
        request, waiting = self.waiters.add(body, 60.0)
        self.core.handle("reader", m.Request(request, body), 0.0)
        return waiting.future

    def put(self, *keys: str) -> None:
        self.ask(m.Commit("p", list(keys), tags=[{"key": key} for key in keys])).result()

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            assert self.core.pages is not None
            self.core.pages.step()

    def _deliver(self, client: str, response: m.Response) -> None:
        response = decode_response(encode(response))
        assert not isinstance(response.body, m.MakeSegments | m.FreeSegments)
        self.waiters.answer(response.id, response.body)


@pytest.fixture
async def paged():
    paged = Paged()
    paged.put(*(f"k{i}" for i in range(COUNT)))
    return paged


async def test_a_long_listing_comes_in_parts_and_others_are_answered_in_between(paged):
    listing = paged.ask(m.ListKeys("p"))
    for _ in range(3):
        assert not listing.done()
        paged.step()
        assert paged.ask(m.Clear("p", ["unknown"])).done()
    paged.step()
    assert listing.result().partitions == {"p": {f"k{i}": {"key": f"k{i}"} for i in range(COUNT)}}
    assert not paged.core.pages


async def test_a_short_listing_is_answered_at_once(paged):
    paged.ask(m.Commit("q", ["a"], tags=[{}]))
    assert paged.ask(m.ListKeys("q")).result() == m.Listing({"q": {"a": {}}})


async def test_a_listing_of_all_partitions_names_the_empty_ones_too(paged):
    paged.ask(m.OpenPartition("empty", []))
    listing = paged.ask(m.ListKeys())
    paged.step(5)
    assert {name: len(rows) for name, rows in listing.result().partitions.items()} == {"p": COUNT, "empty": 0}


async def test_rows_that_stay_are_listed_once_whatever_happens_to_others(paged):
    listing = paged.ask(m.ListKeys("p"))
    paged.step()
    gone = [f"k{i}" for i in range(0, COUNT, 2)]
    paged.ask(m.Clear("p", gone))
    paged.put(*(f"new{i}" for i in range(COUNT)))
    paged.step(3)
    rows = listing.result().partitions["p"]
    assert {f"k{i}" for i in range(1, COUNT, 2)} <= rows.keys()
    assert all(tag == {"key": key} for key, tag in rows.items())
    assert not rows.keys() & set(gone[ROWS // 2 :])


def groups_of(paged: Paged, count: int) -> list[m.GroupSpec]:
    specs = [m.GroupSpec(f"g{i}", 1, i) for i in range(count)]
    paged.ask(m.OpenPartition("groups", []))
    paged.ask(m.Admit("groups", specs, [], 0.0)).result()
    return specs


async def test_a_snapshot_in_parts_and_the_changes_since_give_the_state(paged):
    specs = groups_of(paged, 2 * GROUPS + 1)
    watching = paged.ask(m.Watch("groups", -1))
    paged.step()
    dropped = [specs[0].uid, specs[-1].uid]
    paged.ask(m.Drop("groups", dropped, "for this test")).result()
    paged.ask(m.Admit("groups", [m.GroupSpec("late", 1, 9999)], [], 0.0)).result()
    paged.step(3)
    snapshot = watching.result()
    assert snapshot.snapshot
    assert [group.order for group in snapshot.groups] == sorted(group.order for group in snapshot.groups)
    known = {group.uid: group.state for group in snapshot.groups}
    since = paged.ask(m.Watch("groups", snapshot.seq)).result()
    assert not since.snapshot
    known |= {group.uid: group.state for group in since.groups}
    assert {uid for uid, state in known.items() if state == "pending"} == (
        {spec.uid for spec in specs} - set(dropped) | {"late"}
    )


async def test_a_request_that_is_sent_again_is_answered_from_the_beginning(paged):
    listing = paged.ask(m.ListKeys("p"))
    request = max(paged.waiters.waiting)
    paged.step(2)
    paged.core.handle("reader", m.Request(request, m.ListKeys("p")), 0.0)
    paged.step(3)
    assert not listing.done()
    paged.step()
    assert len(listing.result().partitions["p"]) == COUNT


async def test_a_part_that_was_lost_makes_no_answer_with_a_gap(paged):
    listing = paged.ask(m.ListKeys("p"))
    request = max(paged.waiters.waiting)
    paged.step()
    waiting = paged.waiters.waiting.pop(request)
    paged.step()  # nobody is there
    paged.waiters.waiting[request] = waiting
    paged.step(2)
    assert not listing.done()
    paged.core.handle("reader", m.Request(request, m.ListKeys("p")), 0.0)
    paged.step(4)
    assert len(listing.result().partitions["p"]) == COUNT


async def test_a_client_that_has_gone_is_sent_no_further_parts(paged):
    paged.ask(m.ListKeys("p"))
    paged.core.client_gone("reader", 0.0)
    assert not paged.core.pages


async def test_a_tag_that_is_too_large_leaves_nothing_behind_and_its_key_is_named(paged):
    too_large: list[m.Tag] = [{"x": "y" * MAX_TAG}, {"x": ["y" * MAX_TAG]}]
    for tag in too_large:
        with pytest.raises(Invalid, match=f"tag of 'big' takes .* the limit is {MAX_TAG}"):
            paged.ask(m.Commit("new", ["a", "big"], tags=[{}, tag])).result()
    assert "new" not in paged.core.ledger.partitions
    half = "y" * (MAX_TAG * 2 // 3)
    paged.ask(m.Commit("q", ["big"], tags=[{"a": half}])).result()
    with pytest.raises(Invalid, match="tag of 'big'"):  # merged, it would be
        paged.ask(m.Commit("q", ["small", "big"], tags=[{}, {"b": half}])).result()
    assert paged.ask(m.ListKeys("q")).result() == m.Listing({"q": {"big": {"a": half}}})
    paged.ask(m.OpenPartition("g", [m.TaskSpec("generate", "prompt")]))
    with pytest.raises(Invalid, match="tag of group 'big'"):
        paged.ask(m.Admit("g", [m.GroupSpec("big", 1, 0, tag={"x": half})], [])).result()


async def test_an_answer_that_would_be_too_large_is_refused_before_anything_is_done(paged):
    tag = {"x": "y" * (MAX_TAG - 100)}
    keys = [f"b{i}" for i in range(MAX_TAGS // MAX_TAG + 2)]
    for key in keys:
        paged.ask(m.Commit("q", [key], tags=[tag])).result()
    before = paged.core.ledger.fingerprint()
    with pytest.raises(Invalid, match=f"a put of {len(keys) + 1} rows would tell .* fewer at once"):
        paged.ask(m.Commit("q", [*keys, "new"], tags=[tag for _ in [*keys, "new"]])).result()
    serials = paged.core.ledger.find(m.Find("q", fields=[])).rows
    with pytest.raises(Invalid, match=f"a fetch of {len(keys)} rows"):
        paged.core.ledger.apply(m.Consume("q", "task", [], serials, serials, {}), 0.0)
    assert paged.core.ledger.fingerprint() == before


async def test_large_tags_are_listed_and_found_in_more_parts(paged):
    tag = {"x": "y" * (MAX_TAG - 100)}
    keys = [f"b{i}" for i in range(100)]
    for key in keys:
        paged.ask(m.Commit("q", [key], tags=[tag])).result()
    sizes = []
    deliver = paged.waiters.answer

    def weigh(request: int, body: m.Reply) -> None:
        sizes.append(len(encode(m.Response(request, body))))
        deliver(request, body)

    paged.waiters.answer = weigh
    listing = paged.ask(m.ListKeys("q"))
    paged.step(200)
    assert listing.result().partitions == {"q": dict.fromkeys(keys, tag)}
    found, after, more = [], -1, True
    while more:
        rows = paged.ask(m.Find("q", fields=[], after=after, count=1000)).result()
        found, after, more = found + rows.keys, int.from_bytes(rows.rows[-8:], "little"), rows.more
    assert found == keys
    assert max(sizes) <= PAGE_TAGS + MAX_TAG


async def test_the_stats_of_many_partitions_come_in_parts_and_others_are_answered_in_between(paged):
    names = [f"q{i}" for i in range(3 * PARTITIONS)]
    for name in names:
        paged.ask(m.Commit(name, ["a"])).result()
    stats = paged.ask(m.Stats())
    paged.step(2)
    assert not stats.done()
    assert paged.ask(m.ClearPartition(names[-1])).done()
    paged.step(3)
    whole = stats.result()
    assert set(whole.partitions) == {"p", *names[:-1]}
    assert whole == paged.core._stats(paged.core.ledger.stats(0.0), 0.0)


@pytest.mark.parametrize("count", [0, 1, CLEARED_AT_ONCE, 2 * CLEARED_AT_ONCE + 1])
async def test_a_clear_of_many_rows_goes_in_parts(count):
    asked: list[m.Clear] = []

    class Asker(QueueClient):
        def __init__(self) -> None:
            pass

        async def _ask(self, body, kind, wait=0.0):
            assert isinstance(body, m.Clear)
            asked.append(body)

    keys = [f"k{i}" for i in range(count)]
    await Asker().clear("p", keys)
    assert [key for body in asked for key in body.keys] == keys
    asked_by_key = len(asked)
    await Asker().clear_rows("p", bytes(range(8)) * count)
    assert b"".join(body.rows for body in asked[asked_by_key:]) == bytes(range(8)) * count
    assert all(max(len(body.keys), len(body.rows) // 8) <= CLEARED_AT_ONCE for body in asked)
    assert len(asked) == 2 * max(1, -(-count // CLEARED_AT_ONCE))
