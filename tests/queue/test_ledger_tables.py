"""The tables that the ledger stands on, and what it says to requests that cannot be right."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from transfer_queue.errors import Conflict, Invalid, NotFound
from transfer_queue.keys import prompt_uid, split_prompt_uid
from transfer_queue.ledger import Ledger
from transfer_queue.ledger.blocks import Segments
from transfer_queue.ledger.changes import ChangeLog
from transfer_queue.ledger.order import Serials
from transfer_queue.ledger.ready import ReadyQueue
from transfer_queue.ledger.rows import RowTable
from transfer_queue.ledger.seen import SeenUids
from transfer_queue.ledger.tag_columns import MAX_COLUMNS
from transfer_queue.net import messages as m

TASKS = [m.TaskSpec("generate", "prompt"), m.TaskSpec("train", "rows", "incarnation")]


def block(field: str, rows: int, offset: int = 0) -> m.Block:
    return m.Block(field, 5, offset, 8 * rows, rows, "dense", "<i8", (), 0)


def encoded(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def opened(**credit: Any) -> Ledger:
    ledger = Ledger()
    ledger.apply(m.OpenPartition("p", TASKS, **credit), 0.0)
    return ledger


def test_seen_uids_is_a_set_that_keeps_runs() -> None:
    uids = [prompt_uid(epoch, i) for epoch in (0, 3) for i in range(300)] + ["a", "b1", "e0p12", "e00p0000001"]
    random.Random(1).shuffle(uids)
    seen, plain = SeenUids(), set()
    for uid in uids[:400]:
        seen.add(uid)
        seen.add(uid)
        plain.add(uid)
        assert all((other in seen) == (other in plain) for other in uids[::37])
    for uid in uids:
        seen.add(uid)
    assert sorted(seen) == sorted(uids)
    assert seen.logical_form() == [[(0, [[0, 300]]), (3, [[0, 300]])], ["a", "b1", "e00p0000001", "e0p12"]]
    for i, uid in enumerate(uids):
        seen.discard(uid)
        seen.discard(uid)
        assert set(uids[i : i + 50]) - set(seen) == {uid}
    assert not seen


def test_only_what_prompt_uid_makes_is_split() -> None:
    for epoch, position in [(0, 0), (12, 9_999_999), (1, 10_000_000)]:
        assert split_prompt_uid(prompt_uid(epoch, position)) == (epoch, position)
    for uid in ["e0p1", "e01p0000001", "e1p01000000000", "x", "e0p0000001_0_0", "e0p\u0660000000"]:
        parts = split_prompt_uid(uid)
        assert parts is None or prompt_uid(*parts) == uid


def test_a_ready_queue_yields_lowest_order_first_and_sweeps_what_left() -> None:
    queue = ReadyQueue()
    for order in range(1000):
        queue.add(order, f"u{order}")
        queue.add(order, f"u{order}")
    for order in range(999):
        queue.discard(f"u{order}")
    queue.add(5, "u5")
    assert len(queue._run) + len(queue._heap) < 200  # pyright: ignore[reportPrivateUsage]
    assert queue.pop(5) == ["u5", "u999"]
    assert queue.pop(1) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_ready_queue_is_a_sorted_set_however_its_members_come_and_go(seed: int) -> None:
    r, queue, members = random.Random(seed), ReadyQueue(), dict[str, int]()
    for i in range(400):
        match r.choice("aaaadggppp"):
            case "a":  # mostly in order
                members[f"u{i}"] = i if r.random() < 0.8 else r.randrange(i + 1)
                queue.add(members[f"u{i}"], f"u{i}")
            case "p":
                count, up_to = r.randrange(4), r.choice([math.inf, r.randrange(i + 1)])
                popped = [uid for order, uid in sorted((o, u) for u, o in members.items()) if order <= up_to][:count]
                assert queue.pop(count, up_to) == popped
                for uid in popped:
                    del members[uid]
            case kind if members:  # "d": it leaves; "g": and comes back, sometimes elsewhere
                uid = r.choice(sorted(members))
                queue.discard(uid)
                order = members.pop(uid)
                if kind == "g":
                    members[uid] = order if r.random() < 0.7 else r.randrange(99)
                    queue.add(members[uid], uid)
        assert queue.first() == min(members.values(), default=math.inf)
        assert set(queue) == set(members)


def test_numbers_of_tags_are_those_of_now_whatever_was_asked_before() -> None:
    r, table = random.Random(5), RowTable(Segments(), Serials())
    for i in range(300):
        match r.randrange(4):
            case 0:
                table.add([f"{i}-{j}" for j in range(r.randrange(1, 4))])
            case 1 if table.ids:
                rows = r.sample(sorted(table.ids.values()), r.randrange(1, min(4, 1 + len(table.ids))))
                table.set_tags(
                    rows, [encoded({"n": r.randrange(9), "m": "x"} if r.random() < 0.8 else {}) for _ in rows]
                )
            case 2 if table.ids and r.random() < 0.5:
                table.erase(r.sample(sorted(table.ids.values()), 1))
            case _:
                asked = np.asarray(r.sample(sorted(table.ids.values()), len(table.ids) // 2), np.int64)
                found = table.tag_columns.numbers("n", table.tags, asked)
                expected = [msgspec.msgpack.decode(table.tags[row]).get("n") for row in asked.tolist()]
                assert [None if np.isnan(value) else value for value in found.tolist()] == expected
    table.set_tags([0], [encoded({"m": "x"})])
    with pytest.raises(ValueError, match="x"):
        table.tag_columns.numbers("m", table.tags, np.asarray([0]))
    for i in range(2 * MAX_COLUMNS):
        table.tag_columns.numbers(f"n{i}", table.tags, np.asarray([0]))
    assert len(table.tag_columns._columns) == MAX_COLUMNS  # pyright: ignore[reportPrivateUsage]


def test_a_change_log_coalesces_and_knows_what_it_forgot() -> None:
    log = ChangeLog(2)
    for uid in "abab":
        log.note(uid)
    assert log.after(0) == [("a", None), ("b", None)]
    assert log.after(3) == [("b", None)]
    log.note("c")
    assert log.after(2) is None
    assert log.after(3) == [("b", None), ("c", None)]
    assert log.after(6) is None


def test_many_changes_are_told_in_several_answers_that_leave_out_none() -> None:
    ledger = opened()
    uids = [prompt_uid(0, i) for i in range(600)]
    ledger.apply(m.Admit("p", [m.GroupSpec(uid, 1, i) for i, uid in enumerate(uids)]), 0.0)
    told, since = [], 0
    while since < ledger.sequence("p"):
        changes = ledger.changes("p", since)
        assert not changes.snapshot
        assert 0 < len(changes.groups) <= 256
        told += [group.uid for group in changes.groups]
        since = changes.seq
        if len(told) < 300:
            ledger.apply(m.Drop("p", [uids[0]], "stale"), 1.0)  # a group that was told already, and one that was not
            ledger.apply(m.Drop("p", [uids[599]], "stale"), 1.0)
    assert sorted(told) == sorted([*uids, uids[0]])


def test_lookup_finds_rows_across_blocks_and_names_what_is_missing() -> None:
    ledger = Ledger()
    ledger.apply(m.Commit("p", ["a", "b"], [block("x", 2), block("y", 2, 64)]), 0.0)
    ledger.apply(m.Commit("p", ["c", "a"], [block("x", 2, 128)], [{"score": 1}, {"score": 2}]), 1.0)
    located = ledger.lookup("p", ["b", "nobody", "a", "c"])
    assert located.keys == ["b", "a", "c"]
    assert encoded(located.tags) == encoded([{}, {"score": 2}, {"score": 1}])
    (place,) = located.places
    assert place.field == "x"
    assert [located.blocks[i].offset for i in place.block[::4]] == [0, 128, 128]
    assert list(place.index[::4]) == [1, 1, 0]
    with pytest.raises(NotFound, match=r"field 'y' is not there \(yet\) for rows 'c'"):
        ledger.lookup("p", ["a", "c"], ["y"])
    with pytest.raises(NotFound, match="no partition 'q'; there are \\['p'\\]"):
        ledger.lookup("q", ["a"])


def test_a_block_lives_as_long_as_a_row_in_it() -> None:
    ledger = Ledger()
    ledger.apply(m.Commit("p", ["a", "b"], [block("x", 2)]), 0.0)
    ledger.apply(m.Commit("p", ["a"], [block("x", 1, 64)]), 1.0)
    assert ledger.stats(1.0)["p"].nbytes == 24
    ledger.apply(m.Clear("p", ["b"]), 2.0)
    assert ledger.stats(2.0)["p"].nbytes == 8
    ledger.apply(m.Clear("p", ["a"]), 3.0)
    assert ledger.stats(3.0)["p"].nbytes == 0
    assert ledger.segments.take_emptied() == {5}


def test_bytes_are_a_credit_too() -> None:
    ledger = opened(max_bytes=20)
    ledger.apply(m.Admit("p", [m.GroupSpec("u", 1, 0)], [block("raw", 1)]), 0.0)
    more = m.Admit("p", [m.GroupSpec("v", 1, 1), m.GroupSpec("w", 1, 2)], [block("raw", 2, 64)])
    assert not ledger.can_admit(more)
    ledger.apply(m.Drop("p", ["u"], "stale"), 1.0)
    assert ledger.can_admit(more)


@pytest.mark.parametrize(
    ("mutation", "text"),
    [
        (m.Commit("p", ["a", "a"]), "key given twice: 'a'"),
        (m.Commit("p", ["a"], [block("x", 2)]), "has 2 rows, the message has 1"),
        (m.Commit("p", ["a"], [m.Block("x", 1, 0, 7, 1, "dense", "<f4", (), 0)]), "take 4 bytes, the block has 7"),
        (m.Commit("p", ["a"], [m.Block("x", 1, 0, 8, 1, "dense", "O", (), 0)]), "holds references"),
        (m.Commit("p", ["a"], [m.Block("x", 1, -64, 8, 1, "dense", "<i8", (), 0)]), "negative"),
        (m.Commit("p", ["a"], [m.Block("x", 1, 0, 8, 1, "ragged", "<i8", (), 0)]), "cannot hold the offsets"),
        (m.Commit("p", ["a"], tags=[{"t": {"deep": [1, object()]}}]), "tag 't' of 'a' is a object"),
        (m.Commit("p", ["a"], tags=[{"t": 1 << 70}]), "beyond 64 bits"),
        (m.Commit("p", ["a"], tags=[]), "0 tags for 1 keys"),
        (m.Commit("p", [""]), "has 0 characters"),
        (m.Admit("p", [m.GroupSpec("u_0_1", 1, 0)]), "looks like a trajectory key"),
        (m.Admit("p", [m.GroupSpec("u", 2, 0, min_sessions=3)]), "min_sessions=3"),
        (m.Admit("p", [m.GroupSpec(str(i), 1, 0) for i in range(9)]), "9 groups never fit into the 8"),
        (m.Lease("p", "train", "t", groups=1, uids=["u"]), "either groups"),
        (m.OpenPartition("q", [m.TaskSpec("t", "rows", ttl=float("nan"))]), "ttl=nan"),
        (m.OpenPartition("q", [m.TaskSpec("t", "prompt", fields=["x"])]), "no rows yet"),
        (m.Drop("p", ["u"], ""), "needs a reason"),
    ],
)
def test_a_request_that_cannot_be_right_is_refused_with_its_value(mutation: m.Mutation, text: str) -> None:
    ledger = opened(max_groups=8)
    before = ledger.fingerprint()
    with pytest.raises(Invalid, match=text):
        ledger.apply(mutation, 1.0)
    assert ledger.fingerprint() == before


def test_a_partition_opens_again_with_other_credit_but_not_with_other_tasks() -> None:
    ledger = opened(max_groups=1)
    slower = [m.TaskSpec("generate", "prompt", ttl=99.0), TASKS[1]]
    ledger.apply(m.OpenPartition("p", slower, max_groups=5), 1.0)
    assert ledger.stats(1.0)["p"].max_groups == 5
    with pytest.raises(Conflict, match="use another partition"):
        ledger.apply(m.OpenPartition("p", TASKS[:1]), 2.0)


def test_a_session_end_without_its_rows_or_twice_is_a_conflict() -> None:
    ledger = opened()
    ledger.apply(m.Admit("p", [m.GroupSpec("u", 2, 0)]), 0.0)
    with pytest.raises(Conflict, match="rows 'u_0_0' were not committed"):
        ledger.apply(m.Commit("p", [], closes=[m.SessionClose("u", 0, ["u_0_0"])]), 1.0)
    ledger.apply(m.Commit("p", ["u_0_0", "u_0_1"], closes=[m.SessionClose("u", 0, ["u_0_1"])]), 1.0)
    assert set(ledger.listing("p").partitions["p"]) == {"u", "u_0_1"}
    with pytest.raises(Conflict, match="closed already"):
        ledger.apply(m.Commit("p", [], closes=[m.SessionClose("u", 0, [], failed="boom")]), 2.0)


def test_a_group_with_too_few_successes_is_dropped_with_the_first_reason() -> None:
    ledger = opened()
    ledger.apply(m.Admit("p", [m.GroupSpec("u", 2, 0), m.GroupSpec("v", 2, 1, min_sessions=1)]), 0.0)
    for uid in "uv":
        ends = [m.SessionClose(uid, 0, [f"{uid}_0_0"]), m.SessionClose(uid, 1, [], failed="tool: no answer")]
        ledger.apply(m.Commit("p", [f"{uid}_0_0"], closes=ends), 1.0)
    changes = ledger.changes("p", 0)
    assert [(g.uid, g.state, g.reason) for g in changes.groups] == [
        ("u", "dropped", "failed: tool: no answer"),
        ("v", "ready", ""),
    ]
    assert ledger.stats(1.0)["p"].dropped == {"failed": 1}


def test_leasing_does_not_slow_down_with_the_groups_that_wait() -> None:
    """R19: 256 of 100k ready rows in a few milliseconds; here with a generous factor for a busy machine."""
    ledger = opened()
    specs = [m.GroupSpec(prompt_uid(0, i), 1, i) for i in range(20_000)]
    ledger.apply(m.Admit("p", specs), 0.0)
    times: list[float] = []
    for _ in range(20):
        start = time.process_time()
        ledger.apply(m.Lease("p", "generate", "w", groups=256), 1.0)
        times.append(time.process_time() - start)
    assert sorted(times)[10] < 0.05
