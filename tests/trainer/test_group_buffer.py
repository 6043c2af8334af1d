"""The sans-IO view of ready groups, driven by change lists."""

from __future__ import annotations

from streamrl.trainer.group_buffer import GroupBuffer
from streamrl.trainer.selection import Drop, Selection, oldest_version
from transfer_queue.net.messages import Changes, Group, Row


def group(uid: str, order: int, state: str = "ready", *, versions: tuple[int, ...] = (3,), reason: str = "") -> Group:
    rows = [Row(f"{uid}_{i}_0", {"min_global_steps": v, "session": i, "score": 1.0}) for i, v in enumerate(versions)]
    return Group(uid, state, len(versions), order, {}, rows=rows if state == "ready" else [], reason=reason)  # type: ignore[arg-type]


def changes(seq: int, *groups: Group, snapshot: bool = False) -> Changes:
    return Changes(seq, list(groups), {"ready": len(groups)}, snapshot)


def test_ready_groups_come_oldest_dispatch_order_first() -> None:
    buffer = GroupBuffer()
    buffer.apply(changes(1, group("b", 2), group("a", 1), group("c", 3, "generating")))
    assert [g.uid for g in buffer.ready()] == ["a", "b"]
    assert [g.uid for g in buffer.waiting()] == ["c"]


def test_a_taken_group_is_not_offered_again_until_the_queue_speaks_of_it() -> None:
    buffer = GroupBuffer()
    buffer.apply(changes(1, group("a", 1)))
    buffer.forget(["a"])
    assert buffer.ready() == []
    buffer.apply(changes(2, group("a", 1)))
    assert [g.uid for g in buffer.ready()] == ["a"]


def test_a_snapshot_replaces_what_was_known() -> None:
    buffer = GroupBuffer()
    buffer.apply(changes(1, group("a", 1), group("b", 2)))
    buffer.apply(changes(9, group("b", 2), snapshot=True))
    assert list(buffer.groups) == ["b"]
    assert buffer.seq == 9


def test_groups_that_leave_untrained_are_told_and_failures_in_a_row_are_counted() -> None:
    buffer = GroupBuffer()
    left = buffer.apply(
        changes(1, group("a", 1, "dropped", reason="failed: boom"), group("b", 2, "dropped", reason="stale"))
    )
    assert [g.uid for g in left] == ["a", "b"]
    assert buffer.failed_in_a_row == 1
    buffer.apply(changes(2, group("c", 3)))
    assert buffer.failed_in_a_row == 0


def test_a_lost_prompt_is_remembered_until_it_is_admitted_again() -> None:
    buffer = GroupBuffer()
    buffer.apply(changes(1, group("a", 1, "pending", reason="prompt lost")))
    assert list(buffer.lost_prompts) == ["a"]
    buffer.apply(changes(2, group("a", 1, "pending")))
    assert not buffer.lost_prompts


def test_a_group_is_too_old_when_its_oldest_token_exceeds_the_bound() -> None:
    mixed = group("a", 1, versions=(5, 2))
    assert Selection(Drop(2)).unfit(mixed, 5) == "stale"
    assert Selection(Drop(3)).unfit(mixed, 5) is None
    assert Selection().unfit(mixed, 50) is None
    assert oldest_version(mixed) == 2


def test_the_first_groups_that_all_fail_alike_are_told_from_others() -> None:
    def failed(count: int, error: str) -> GroupBuffer:
        buffer = GroupBuffer()
        buffer.apply(changes(1, *(group(f"u{i}", i, "dropped", reason=f"failed: {error}: {i}") for i in range(count))))
        return buffer

    assert failed(8, "KeyError").all_failed_alike
    assert not failed(7, "KeyError").all_failed_alike
    mixed = failed(7, "KeyError")
    mixed.apply(changes(2, group("u8", 8, "dropped", reason="failed: ValueError: no")))
    assert not mixed.all_failed_alike
    once = GroupBuffer()
    once.apply(changes(1, group("a", 0)))
    once.apply(changes(2, *(group(f"u{i}", i, "dropped", reason="failed: KeyError: 1") for i in range(9))))
    assert not once.all_failed_alike


def begun(buffer: GroupBuffer) -> dict[str, int]:
    return {uid: version for uid, version in sorted(buffer.begun.items()) if buffer.groups[uid].state != "ready"}


def growing(uid: str, order: int, *closed: int) -> Group:
    return Group(uid, "generating", 4, order, {}, sessions=list(closed))


def test_a_group_began_no_earlier_than_the_version_in_service_when_it_was_last_seen_pending() -> None:
    buffer = GroupBuffer(in_service=5)
    buffer.apply(Changes(1, [group("a", 0), group("b", 1, "pending"), group("c", 2, "pending")], {"pending": 2}))
    assert begun(buffer) == {"b": 5, "c": 5}
    buffer.will_be_trained(["a"], 6)
    buffer.apply(Changes(3, [growing("b", 1), group("a", 0, "trained")], {"pending": 1}))
    assert begun(buffer) == {"b": 5, "c": 6}, "b was leased before the groups of step 6 were acked, c was not"


def test_a_group_leased_after_the_ack_of_a_step_began_with_its_version_also_if_it_is_new() -> None:
    buffer = GroupBuffer(in_service=5)
    buffer.apply(Changes(1, [group("a", 0)], {"pending": 0}))
    buffer.will_be_trained(["a"], 6)
    buffer.apply(Changes(4, [group("a", 0, "trained"), growing("b", 1), growing("c", 2, 0)], {"pending": 0}))
    assert begun(buffer) == {"b": 6, "c": 5}, "the last news of c is the end of a session: it may have begun before"


def test_a_group_that_was_given_back_keeps_its_age_if_it_keeps_sessions() -> None:
    buffer = GroupBuffer(in_service=5)
    buffer.apply(Changes(1, [group("x", 9), growing("a", 0, 1), growing("b", 1)], {"pending": 0}))
    given = [
        Group(uid, "pending", 4, order, {}, sessions=closed) for uid, order, closed in (("a", 0, [1]), ("b", 1, []))
    ]
    buffer.will_be_trained(["x"], 6)
    buffer.apply(Changes(4, [group("x", 9, "trained"), *given], {"pending": 2}))
    assert begun(buffer) == {"a": 5, "b": 6}


def test_news_that_do_not_tell_all_make_no_group_younger() -> None:
    buffer = GroupBuffer(in_service=5)
    buffer.apply(Changes(1, [group("x", 9), group("a", 0, "pending")], {"pending": 1}))
    buffer.will_be_trained(["x"], 6)
    buffer.apply(Changes(3, [group("x", 9, "trained")], {"pending": 0}))  # a was leased, and that is told next
    assert begun(buffer) == {"a": 5}


def test_what_is_coming_has_been_begun_and_is_within_the_credit() -> None:
    buffer = GroupBuffer()
    given_back = [Group(uid, "pending", 4, order, {}, sessions=[0]) for uid, order in (("b", 1), ("e", 4))]
    buffer.apply(changes(1, group("a", 0), *given_back, growing("c", 2), group("d", 3, "pending"), growing("f", 5)))
    assert [g.uid for g in buffer.coming(credit=9)] == ["b", "c", "e", "f"]
    assert [g.uid for g in buffer.coming(credit=4)] == ["b", "c", "f"], "nobody leases e before others are gone"


def test_a_group_that_leaves_has_the_rows_it_had() -> None:
    buffer = GroupBuffer()
    buffer.apply(changes(1, group("a", 1, versions=(3, 4))))
    [left] = buffer.apply(changes(2, group("a", 1, "dropped", reason="stale")))
    assert [row.tag["min_global_steps"] for row in left.rows] == [3, 4]
