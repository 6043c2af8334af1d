"""Which of the ready groups are trained, and how many prompts that takes, by calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from streamrl.trainer.filter_rate import MOST, FilterRate
from streamrl.trainer.selection import Drop, Selection
from tests.trainer.groups import ready_group
from transfer_queue.net.messages import Group

READY = [ready_group(f"u{i}", [1.0, 0.0]) for i in range(4)]


class Chooses:
    def __init__(self, *places: int) -> None:
        self.places = places

    def choose(self, ready: Sequence[Group], count: int, version: int) -> list[Group] | None:
        return [ready[place] for place in self.places] or None


def test_a_sampler_chooses_or_waits() -> None:
    chosen = Selection(sampler=Chooses(3, 1)).choose(READY, 2, 0)
    assert chosen is not None
    assert [group.uid for group in chosen] == ["u3", "u1"]
    assert Selection(sampler=Chooses()).choose(READY, 2, 0) is None
    assert list(Selection(Drop(2)).choose(READY, 2, 0) or ()) == READY[:2]


@pytest.mark.parametrize("places", [(1,), (1, 1), (0, 1, 2)])
def test_a_sampler_that_chooses_anything_else_is_an_error_with_its_name(places: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"Chooses\.choose gave .* where 2 of 4 ready ones are wanted"):
        Selection(sampler=Chooses(*places)).choose(READY, 2, 0)


class Foreign:
    def choose(self, ready: Sequence[Group], count: int, version: int) -> list[Group]:
        return [ready[0], ready_group("u77", [1.0])]


def test_a_sampler_cannot_choose_what_is_not_ready() -> None:
    with pytest.raises(RuntimeError, match="1 that are not ready"):
        Selection(sampler=Foreign()).choose(READY, 2, 0)


def test_the_filter_rate_follows_what_is_filtered_and_asks_for_no_more_than_four_prompts() -> None:
    rate = FilterRate()
    assert rate.prompts_per_group == 1.0
    rate.look(kept=8, filtered=8)
    assert rate.prompts_per_group == pytest.approx(2.0)
    for step in range(2, 30):
        rate.look(kept=8 * step, filtered=8)
    assert rate.prompts_per_group == pytest.approx(1.0, abs=0.01)
    rate.look(kept=8 * 29, filtered=10**6)
    assert rate.prompts_per_group == MOST
