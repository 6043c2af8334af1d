"""Groups with large tags are told, a few at a time: no answer exceeds a frame, and none is refused for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.pages import GROUPS
from transfer_queue.errors import DeadlineExceeded, Invalid
from transfer_queue.ledger import Ledger
from transfer_queue.ledger.checks import MAX_REASON
from transfer_queue.ledger.telling import MAX_TOLD, PAGE_GROUPS, nbytes_of
from transfer_queue.net import messages as m
from transfer_queue.net.codec import MAX_FRAME, decode_response, encode
from transfer_queue.net.waiters import Waiters
from transfer_queue.storage.journal import MemoryJournal

TASKS = [m.TaskSpec("generate", "prompt"), m.TaskSpec("train", "rows", "incarnation")]
MIB = 1 << 20
LARGE: m.Tag = {"x": "y" * (MIB - 200)}


class Telling:
    """A core that answers in parts, and how large its answers are."""

    def __init__(self, change_log: int = 4096) -> None:
        self.sizes: list[int] = []
        self.waiters = Waiters("reader", "the core", str)
        ledger = Ledger(change_log=change_log)
        self.core = ControllerCore(ledger, send=self._deliver, journal=MemoryJournal(), paged=True)
        self.ask(m.Hello(m.VERSION, "", "", "reader"))
        self.ask(m.OpenPartition("p", TASKS))

    def ask(self, body: m.Mutation | m.Query) -> asyncio.Future[Any]:
        request, waiting = self.waiters.add(body, 60.0)
        self.core.handle("reader", m.Request(request, body), 0.0)
        return waiting.future

    def ready(self, groups: int, n: int = 2, tag: m.Tag = LARGE) -> list[str]:
        uids = [f"u{i}" for i in range(groups)]
        for order, uid in enumerate(uids):
            self.ask(m.Admit("p", [m.GroupSpec(uid, n, order)])).result()
            for session in range(n):
                self.close(uid, session, tag).result()
        return uids

    def close(self, uid: str, session: int, tag: m.Tag, rows: int = 1) -> asyncio.Future[Any]:
        keys = [f"{uid}_{session}_{i}" for i in range(rows)]
        return self.ask(m.Commit("p", keys, tags=[tag] * rows, closes=[m.SessionClose(uid, session, keys)]))

    def pages(self) -> None:
        assert self.core.pages is not None
        while self.core.pages:
            self.core.pages.step()

    def _deliver(self, client: str, response: m.Response) -> None:
        frame = encode(response)
        self.sizes.append(len(frame))
        response = decode_response(frame)
        self.waiters.answer(response.id, response.body)


@pytest.fixture
async def telling() -> Telling:
    return Telling()


async def test_a_lease_takes_so_many_groups_as_an_answer_holds_and_leaves_the_others(telling):
    uids = telling.ready(10)
    taken: list[list[str]] = []
    for _ in range(3):
        leased = telling.ask(m.Lease("p", "train", "t", groups=10)).result()
        taken.append([group.uid for group in leased.groups])
    assert taken == [uids[:4], uids[4:8], uids[8:]]
    with pytest.raises(DeadlineExceeded):
        telling.ask(m.Lease("p", "train", "t", groups=1)).result()
    assert max(telling.sizes) < PAGE_GROUPS


async def test_a_group_that_is_larger_than_an_answer_should_be_is_leased_alone(telling):
    (uid,) = telling.ready(1, n=30)
    telling.ask(m.Admit("p", [m.GroupSpec("small", 1, 1)])).result()
    telling.close("small", 0, {}).result()
    leases = [telling.ask(m.Lease("p", "train", "t", groups=2)).result() for _ in range(2)]
    assert [[group.uid for group in leased.groups] for leased in leases] == [[uid], ["small"]]
    assert [len(leased.groups[0].rows) for leased in leases] == [30, 1]
    assert PAGE_GROUPS < max(telling.sizes) < MAX_FRAME


async def test_groups_with_large_tags_of_their_own_are_leased_a_few_at_a_time_too(telling):
    specs = [m.GroupSpec(f"u{i}", 1, i, tag={"x": "y" * 60_000}) for i in range(300)]
    telling.ask(m.Admit("p", specs)).result()
    leased, held = [], 0
    while held < 300:
        leased.append(telling.ask(m.Lease("p", "generate", "t", groups=300)).result())
        held += len(leased[-1].groups)
    assert len(leased) == 3
    assert [group.order for one in leased for group in one.groups] == list(range(300))
    assert max(telling.sizes) < PAGE_GROUPS


async def test_groups_that_are_named_are_leased_all_or_not_at_all(telling):
    uids = telling.ready(21)
    before = telling.core.ledger.fingerprint()
    with pytest.raises(Invalid, match=f"tags of these 21 groups exceed the {MAX_TOLD} bytes of an answer; lease fewer"):
        telling.ask(m.Lease("p", "train", "t", uids=uids)).result()
    assert telling.core.ledger.fingerprint() == before
    assert len(telling.ask(m.Lease("p", "train", "t", uids=uids[1:20])).result().groups) == 19


async def test_changes_with_large_tags_are_told_in_several_answers_that_leave_out_none(telling):
    uids = telling.ready(10)
    telling.ask(m.Drop("p", ["u4"], "stale")).result()
    seen, seq = {}, 0
    for _ in range(5):
        changes = telling.ask(m.Watch("p", seq)).result()
        assert not changes.snapshot
        seen |= {group.uid: group.state for group in changes.groups}
        seq = changes.seq
    assert seen == dict.fromkeys(uids, "ready") | {"u4": "dropped"}
    assert seq == telling.core.ledger.sequence("p")
    assert max(telling.sizes) < PAGE_GROUPS


async def test_a_snapshot_of_few_groups_with_large_tags_comes_in_parts(telling):
    uids = telling.ready(10)
    snapshot = telling.ask(m.Watch("p", -1))
    telling.pages()
    assert [group.uid for group in snapshot.result().groups] == uids
    assert max(telling.sizes) < PAGE_GROUPS


async def test_a_watcher_who_waits_while_more_changes_than_are_remembered_gets_a_snapshot_in_parts():
    telling = Telling(change_log=10)
    telling.ask(m.Admit("p", [m.GroupSpec("first", 1, 0)])).result()
    waiting = telling.ask(m.Watch("p", telling.core.ledger.sequence("p"), wait=30.0))
    telling.ask(m.Admit("p", [m.GroupSpec(f"u{i}", 1, i) for i in range(1, 2 * GROUPS)])).result()
    assert not waiting.done()
    telling.pages()
    told = waiting.result()
    assert told.snapshot
    assert len(told.groups) == 2 * GROUPS


async def test_a_session_with_more_than_its_share_is_refused_and_can_end_as_failed(telling):
    telling.ask(m.Admit("p", [m.GroupSpec("u", 10, 0, min_sessions=1)])).result()
    before = telling.core.ledger.fingerprint()
    with pytest.raises(
        Invalid, match=f"session 0 of group 'u' have .* the limit is {MAX_TOLD // 10} for each of its 10"
    ):
        telling.close("u", 0, LARGE, rows=5).result()
    assert telling.core.ledger.fingerprint() == before
    telling.ask(m.Commit("p", ["u_0_0", "u_0_1", "u_0_2"], tags=[LARGE] * 3)).result()
    keys = [f"u_0_{i}" for i in range(5)]
    with pytest.raises(Invalid, match="session 0 of group 'u'"):
        telling.ask(m.Commit("p", keys[3:], tags=[LARGE] * 2, closes=[m.SessionClose("u", 0, keys)])).result()
    telling.ask(m.Commit("p", [], closes=[m.SessionClose("u", 0, [], "too much")])).result()
    for session in range(1, 10):
        telling.close("u", session, LARGE, rows=3).result()
    (group,) = telling.ask(m.Lease("p", "train", "t", groups=1)).result().groups
    assert len(group.rows) == 27


async def test_the_tags_of_a_closed_session_grow_no_further_than_its_share(telling):
    telling.ask(m.Admit("p", [m.GroupSpec("u", 45, 0)])).result()
    half = {"x": "y" * (MIB // 2)}
    for session in range(45):
        telling.close("u", session, half).result()
    telling.ask(m.Commit("p", ["u_3_0", "u_4_0"], tags=[{"z": "y" * (MIB // 3)}] * 2)).result()
    before = telling.core.ledger.fingerprint()
    with pytest.raises(Invalid, match="session 3 of group 'u'"):
        telling.ask(m.Commit("p", ["u_3_0"], tags=[{"v": "y" * (MIB // 10)}])).result()
    assert telling.core.ledger.fingerprint() == before


async def test_what_a_group_takes_in_an_answer_is_not_underrated(telling):
    specs = [m.GroupSpec("ü" * 400, 3, 1 << 60, tag={"x": 1}), m.GroupSpec("v", 70, 2)]
    telling.ask(m.Admit("p", specs)).result()
    for spec in specs:
        for session in range(spec.n):
            telling.close(spec.uid, session, {"x": "y" * session}, rows=2).result()
    p = telling.core.ledger.partition("p")
    for group in p.groups.values():
        assert len(encode(p.view(group))) <= nbytes_of(p, group)


async def test_a_reason_is_told_but_not_at_any_length(telling):
    telling.ready(1, tag={})
    leased = telling.ask(m.Lease("p", "train", "t", groups=1)).result()
    telling.ask(m.Nack("p", leased.token, ["u0"], "why " * MAX_REASON)).result()
    reason = telling.ask(m.Watch("p", 0)).result().groups[0].reason
    assert reason.startswith("why why")
    assert len(reason) == MAX_REASON + 3
