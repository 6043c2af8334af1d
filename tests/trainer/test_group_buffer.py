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
