"""What is too old and what is done about it, by calls."""

from __future__ import annotations

import random

import pytest

from streamrl.config.sections.trainer import SamplerConfig
from streamrl.trainer.staleness import Drop, Mask, Measured, Room, Wait, newest_version, oldest_version, staleness
from transfer_queue.net.messages import Group, Row


def group(order: int, *spans: tuple[int, int]) -> Group:
    """A ready group with a row per (oldest, newest) version of its tokens."""
    rows = [
        Row(f"u{order}_{i}_0", {"min_global_steps": oldest, "max_global_steps": newest, "session": i, "score": 1.0})
        for i, (oldest, newest) in enumerate(spans)
    ]
    return Group(f"u{order}", "ready", len(spans), order, {}, rows=rows)


MIXED = group(1, (2, 5), (4, 4))


def test_drop_looks_at_the_oldest_token_and_mask_at_the_newest() -> None:
    assert (oldest_version(MIXED), newest_version(MIXED)) == (2, 5)
    assert [Drop(3).unfit(MIXED, version) for version in (5, 6)] == [False, True]
    assert [Mask(3).unfit(MIXED, version) for version in (8, 9)] == [False, True]
    assert not Measured().unfit(MIXED, 99)


def test_a_group_that_is_being_generated_is_hopeless_for_drop_alone() -> None:
    assert [Drop(2).hopeless(3, version) for version in (5, 6)] == [False, True]
    assert not Mask(2).hopeless(3, 99)
    assert not Wait(2).hopeless(3, 99)
    assert not Measured().hopeless(3, 99)


def test_a_bound_of_s_lets_s_batches_be_issued_ahead_where_groups_could_get_too_old() -> None:
    for policy in (Drop(2), Wait(2), Mask(2)):
        assert policy.credit(80, 10) == 30
        assert policy.credit(20, 10) == 20
    assert Measured().credit(80, 10) == 80


@pytest.mark.parametrize(
    ("strategy", "threshold", "policy"),
    [
        ("drop", 1, Drop(0)),
        ("wait", 3, Wait(2)),
        ("mask", 8, Mask(7)),
        (None, 8, Measured()),
        ("wait", None, Measured()),
    ],
)
def test_verls_threshold_counts_from_one(strategy, threshold, policy) -> None:
    config = SamplerConfig(max_off_policy_strategy=strategy, max_off_policy_threshold=threshold)
    assert staleness(config) == policy


def test_wait_prefers_the_oldest_tokens_to_the_oldest_prompts() -> None:
    ready = [group(1, (5, 5)), group(2, (3, 5)), group(3, (3, 3)), group(4, (4, 4))]
    assert [g.order for g in Wait(2).preferred(ready, 3)] == [2, 3, 4]


def test_wait_holds_back_for_a_group_that_the_next_version_would_make_too_old() -> None:
    policy, room = Wait(2), Room(now=0, later=2)
    assert policy.holds_back([], [3], 5, room), "version 5 is the last that may train a token of version 3"
    assert not policy.holds_back([], [3], 4, room), "it can be trained at version 5"
    assert not policy.holds_back([], [3], 5, Room(now=1, later=2)), "a later mini-batch of this version has room for it"
    assert policy.holds_back([], [3, 3, 3], 4, room), "version 5 trains two"
    assert not policy.holds_back([group(1, (2, 2))], [], 5, room), "it is too late already, and waiting would not help"


def test_what_is_ready_counts_too_as_it_takes_the_room_of_others() -> None:
    rest = [group(1, (3, 3)), group(2, (3, 3))]
    assert Wait(2).holds_back(rest, [3], 4, Room(now=0, later=2))
    assert not Wait(2).holds_back(rest, [4], 4, Room(now=0, later=2))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_wait_never_lets_a_token_get_too_old_drops_nothing_and_never_stands_still(seed: int, bound: int) -> None:
    """A run of nothing but decisions: groups begin in order as slots come free, take random times with a long tail, and
    are trained in mini-batches of random size."""
    rng = random.Random(seed)
    per_step = rng.choice([2, 4, 6])
    mini = rng.choice([m for m in (1, 2, 3, per_step) if per_step % m == 0])
    slots, policy = rng.randint(1, 3 * per_step), Wait(bound)
    credit = policy.credit(rng.randint(per_step, 6 * per_step), per_step)
    version = issued = trained = 0
    pending: list[int] = []
    growing: dict[int, tuple[int, float]] = {}  # order -> version of the first token, when it ends
    ready: list[Group] = []
    now = 0.0
    ages = []
    while version < 40:
        chosen: list[Group] = []
        for room in range(per_step - mini, -1, -mini):
            while True:
                while len(pending) + len(growing) + len(ready) + len(chosen) < credit:
                    pending.append(issued)
                    issued += 1
                while pending and len(growing) < slots:
                    growing[pending.pop(0)] = (version, now + rng.lognormvariate(0.0, 1.5))
                if len(ready) >= mini:
                    batch = list(policy.preferred(sorted(ready, key=lambda g: g.order), mini))
                    rest = [g for g in ready if g not in batch]
                    begun = [first for first, _ in growing.values()] + [version] * len(pending)
                    if not policy.holds_back(rest, begun, version, Room(room, per_step)):
                        break
                assert growing, f"seed {seed}: it waits, and nothing is being generated"
                order = min(growing, key=lambda o: growing[o][1])
                first, now = growing.pop(order)
                ready.append(group(order, (first, version)))
            ready = rest
            chosen += batch
            now += rng.expovariate(1.0)  # training
            for order in [o for o, (_, end) in growing.items() if end <= now]:
                ready.append(group(order, (growing.pop(order)[0], version)))
        ages += [version - oldest_version(g) for g in chosen]
        trained += len(chosen)
        version += 1
    assert max(ages) <= bound
    assert trained == 40 * per_step
