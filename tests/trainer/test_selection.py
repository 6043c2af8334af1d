"""Which of the ready groups are trained, and how many prompts that takes, by calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from streamrl.trainer.filter_rate import MOST, FilterRate
from streamrl.trainer.selection import Drop, SamplerError, Selection
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
    with pytest.raises(RuntimeError, match=r"Chooses\.choose .* gave .* where 2 of 4 ready ones are wanted"):
        Selection(sampler=Chooses(*places)).choose(READY, 2, 0)


class Foreign:
    def choose(self, ready: Sequence[Group], count: int, version: int) -> list[Group]:
        return [ready[0], ready_group("u77", [1.0])]


def test_a_sampler_cannot_choose_what_is_not_ready() -> None:
    with pytest.raises(RuntimeError, match="1 that are not ready"):
        Selection(sampler=Foreign()).choose(READY, 2, 0)


class Does:
    """A user's sampler, whose `choose` is `what`."""

    def __init__(self, what: Callable[[], Any]) -> None:
        self.what = what

    def choose(self, ready: Sequence[Group], count: int, version: int) -> Any:
        return self.what()


async def coroutine() -> None: ...


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda: 1 // 0, r"ZeroDivisionError: .*test_selection\.py:\d+ in <lambda>"),
        (lambda: sys.exit(3), r"wanted to exit \(3\).*test_selection\.py"),
        (lambda: ["u1", "u2"], r"returned \['u1', 'u2'\], a list"),
        (lambda: 7, "returned 7, a int"),
        (lambda: (group for group in READY), "a generator"),
        (coroutine, "a coroutine; .* is no async function"),
    ],
)
def test_a_sampler_that_is_broken_is_named_with_what_it_did(what: Callable[[], Any], said: str) -> None:
    with pytest.raises(SamplerError, match=rf"Does\.choose \(trainer\.v1\.sampler\.custom_sampler\) .*{said}"):
        Selection(sampler=Does(what)).choose(READY, 2, 0)


def test_a_sampler_that_does_not_return_is_told_of_while_it_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamrl.trainer.selection.SLOW", 0.05)
    told, said = threading.Event(), list[tuple[str, ...]]()
    monkeypatch.setattr("agent_loop.user_code.logger.error", lambda *words: (said.append(words), told.set()))
    Selection(sampler=Does(lambda: told.wait(10.0) and None)).choose(READY, 2, 0)
    assert "has not returned after 0.05 s" in said[0][1]
    assert "test_selection.py" in said[0][2]


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
