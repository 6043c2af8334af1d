"""The whole queue in one process, with deaths at every failpoint and at any moment: nothing lost, twice or corrupt.

A failure prints its seed; `simulate(seed)` does the same again. CHAOS_FIRST is the first seed of the long test.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.queue.chaos import rows, world
from tests.queue.chaos.simulate import NOT_HERE, Outcome, simulate
from transfer_queue.controller import recalling
from transfer_queue.failpoints import FAILPOINTS
from transfer_queue.net.messages import GiveBack

FIRST = int(os.environ.get("CHAOS_FIRST", "1000"))


def test_whatever_dies_nothing_is_lost_done_twice_or_corrupt() -> None:
    outcomes = [simulate(seed) for seed in range(20)]
    assert sum(outcome.deaths["controller"] for outcome in outcomes) >= 10
    assert sum(outcome.deaths["unit"] for outcome in outcomes) >= 10


def test_what_is_lost_with_a_storage_unit_is_generated_again_and_what_was_trained_stays_so() -> None:
    outcomes = [simulate(seed, lose_every=6.0) for seed in range(10)]
    assert sum(outcome.losses for outcome in outcomes) >= 20


def test_whatever_dies_nothing_is_lost_when_memory_is_so_short_that_writers_give_segments_back(monkeypatch) -> None:
    asked: list[list[int]] = []

    def give_back(segments: list[int]) -> GiveBack:
        asked.append(segments)
        return GiveBack(segments)

    monkeypatch.setattr(recalling, "GiveBack", give_back)
    monkeypatch.setattr(world, "BUDGET", 6 * world.SEGMENT)  # the largest put takes nearly all
    monkeypatch.setattr(rows, "DURABLE_WRITERS", ())
    for seed in range(20):
        simulate(seed)
    assert len(asked) >= 3


def test_what_was_acknowledged_as_durable_survives_a_machine_that_loses_its_power() -> None:
    outcomes = [simulate(seed, power_every=4.0) for seed in range(5)]
    assert sum(outcome.blackouts for outcome in outcomes) >= 30


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = (simulate(12) for _ in range(2))
    assert first.trace == second.trace
    assert simulate(13).trace != first.trace


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_whatever_dies_in_500_runs_nothing_is_lost_done_twice_or_corrupt(capsys) -> None:
    outcomes = [simulate(seed) for seed in range(FIRST, FIRST + 520)]
    fired = sum((outcome.fired for outcome in outcomes), Counter())
    with capsys.disabled():
        print(summary(outcomes, fired))  # noqa: T201
    assert sorted(set(FAILPOINTS) - NOT_HERE - set(fired)) == [], "nobody has died there"


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_what_is_lost_with_a_storage_unit_is_generated_again_in_200_runs() -> None:
    outcomes = [simulate(seed, lose_every=6.0) for seed in range(FIRST, FIRST + 200)]
    assert sum(outcome.losses for outcome in outcomes) >= 400


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_what_was_acknowledged_as_durable_survives_200_machines_that_lose_their_power() -> None:
    outcomes = [simulate(seed, power_every=4.0) for seed in range(FIRST, FIRST + 200)]
    assert sum(outcome.blackouts for outcome in outcomes) >= 1500


def summary(outcomes: list[Outcome], fired: Counter[str]) -> str:
    deaths = sum((outcome.deaths for outcome in outcomes), Counter())
    return (
        f"\n{len(outcomes)} runs, {sum(o.seconds for o in outcomes) / 3600:.1f} hours of virtual time, "
        f"{sum(o.lives for o in outcomes)} lives of controllers, {sum(o.records for o in outcomes)} journal records, "
        f"{sum(o.reads for o in outcomes)} rows read and compared\ndeaths: {dict(deaths)}\nat failpoints: {dict(fired)}"
    )
