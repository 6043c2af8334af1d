"""Which prompt is trained in which slot: a function of outcomes, never of their order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from streamrl.data import PromptDataset
from streamrl.trainer.slots import REFILLS, InTurn, OutOfOrder, Schedule, Slot, SlotFeeder, Slots
from tests.trainer.groups import ready_group
from transfer_queue.net.messages import Changes, Group, GroupSpec

ROWS = [{"raw_prompt": [], "n": None, "index": i} for i in range(10)]


def test_a_step_trains_its_prompts_sampled_a_fixed_lag_before() -> None:
    schedule = Schedule(per_step=4, lag=2)
    assert list(schedule.orders(3)) == [8, 9, 10, 11]
    assert {schedule.step_of(order) for order in schedule.orders(3)} == {3}
    assert [schedule.sampled_after(step) for step in range(1, 7)] == [0, 0, 0, 1, 2, 3]
    assert list(schedule.issued_after(0)) == [1, 2, 3]
    for trained in range(5):  # what is issued is sampled by weights that exist, and no older than lag steps
        assert all(trained - 2 <= schedule.sampled_after(s) <= trained for s in schedule.issued_after(trained) if s > 3)


def test_what_is_trained_in_a_slot_does_not_depend_on_the_order_of_ends() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201
    rng = random.Random(seed)
    usable = {(order, attempt): rng.random() < 0.4 for order in range(20) for attempt in range(REFILLS + 1)}

    def trained(rng: random.Random) -> dict[int, int]:
        slots, kept = Slots(), {}
        out = slots.missing(range(20))
        for slot in out:
            slots.stands(slot)
        while out:
            slot = out.pop(rng.randrange(len(out)))
            if usable[slot.order, slot.attempt]:
                kept[slot.order] = slot.attempt
            elif (following := slots.ended(slot)) is not None:
                out.append(following)
                assert slots.ended(slot) is None, "told twice, and one comes in its place"
        return kept

    assert trained(random.Random(1)) == trained(random.Random(2)) == trained(random.Random(3))


def test_the_prompts_of_all_slots_and_attempts_are_different_ones() -> None:
    prompts = [Slot(order, attempt).prompt(7) for order in range(50) for attempt in range(REFILLS + 1)]
    assert len(set(prompts)) == len(prompts)
    assert [Slot(order).prompt(7) for order in range(50)] == list(range(50))


def test_a_slot_whose_prompts_all_ended_untrained_is_an_error() -> None:
    slots = Slots()
    slots.stands(Slot(3, REFILLS))
    with pytest.raises(RuntimeError, match="slot 3 had 65 prompts"):
        slots.ended(Slot(3, REFILLS))


def ready(order: int, *, asked: int = 1) -> Group:
    return ready_group(f"u{order}", [0.0, 1.0], weight_version=asked, refill=0)


def test_a_batch_waits_for_its_own_slots_and_takes_no_other() -> None:
    turn = InTurn(lambda: 4)
    assert turn.choose([ready(5), ready(6), ready(7), ready(8)], 2, 1) is None
    assert [g.order for g in turn.choose([ready(4), ready(5), ready(6)], 2, 1) or ()] == [4, 5]


def test_a_server_that_does_not_heed_the_version_is_found_out() -> None:
    with pytest.raises(OutOfOrder, match=r"group u0 was to be sampled by weight version 0, not \[1\]"):
        InTurn(lambda: 0).choose([ready(0, asked=0)], 1, 1)


class Queue:
    """Admits what it has not finished with."""

    def __init__(self, finished: Sequence[str] = ()) -> None:
        self.finished = set(finished)
        self.live: dict[str, GroupSpec] = {}

    async def admit(self, partition: str, specs: list[GroupSpec], columns: dict[str, Any], *, wait: float) -> None:
        self.live |= {spec.uid: spec for spec in specs if spec.uid not in self.finished}

    async def watch(self, partition: str, since: int) -> Changes:
        return Changes(1, [Group(s.uid, "pending", s.n, s.order, s.tag) for s in self.live.values()], {}, True)


def feeder(queue: Queue) -> SlotFeeder:
    source = PromptDataset(ROWS, shuffle=False)
    return SlotFeeder(
        queue, source, partition="train", n=2, chunk=3, baseline=False, version_of=lambda order: order // 4  # type: ignore[arg-type]
    )  # fmt: skip


async def fed(target: SlotFeeder, seconds: float = 0.05) -> None:
    target.allow(None)
    task = asyncio.create_task(target.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_prompts_name_their_slot_and_the_version_that_samples_them() -> None:
    queue = Queue()
    target = feeder(queue)
    target.fill(target.slots.missing(range(3, 6)))
    target.left([Group("e0p0000004", "dropped", 2, 4, {"refill": 0}, reason="filtered")])
    await fed(target)
    assert sorted((s.order, s.tag["refill"], s.tag["weight_version"]) for s in queue.live.values()) == [
        (3, 0, 0), (4, 0, 1), (4, 1, 1), (5, 0, 1),
    ]  # fmt: skip


async def test_a_slot_whose_first_prompts_ended_in_an_earlier_life_goes_on_with_the_next() -> None:
    first, second = feeder(Queue()), feeder(Queue())
    spent = [first._prompts([slot]).specs[0].uid for slot in (Slot(1), Slot(1, 1), Slot(2))]
    queue = Queue(spent)
    target = feeder(queue)
    target.resumed([Group("x", "ready", 2, 0, {"refill": 3})])
    target.fill(target.slots.missing(range(4)))
    await fed(target)
    assert sorted((s.order, s.tag["refill"]) for s in queue.live.values()) == [(1, 2), (2, 1), (3, 0)]
    assert second._prompts([Slot(1)]).specs[0].uid == spent[0], "the same after any restart"
