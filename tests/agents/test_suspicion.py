"""Who is blamed for the death of servers, and who is not."""

from __future__ import annotations

import pytest

from agent_loop.llm.suspicion import MAX_CONVICTED, PoisonRequest, Suspicion


def test_two_deaths_make_a_suspect_and_a_third_one_alone_a_verdict() -> None:
    suspicion = Suspicion()
    for place in range(2):
        assert not suspicion.suspects(1)
        suspicion.died(1, f"s{place}", 0, "crashed", alone=True)
        suspicion.check(1)
    assert suspicion.suspects(1)
    suspicion.died(1, "s0", 1, "crashed", alone=True)
    with pytest.raises(PoisonRequest, match="3 LLM servers died under this request, .*: crashed"):
        suspicion.check(1)


def test_who_only_dies_with_others_is_never_blamed() -> None:
    suspicion = Suspicion()
    for times in range(20):
        suspicion.died(1, "s0", times, "killed", alone=False)
    suspicion.check(1)


def test_samples_of_a_prompt_that_die_with_one_server_count_once() -> None:
    suspicion = Suspicion()
    for _ in range(8):
        suspicion.died(1, "s0", 0, "crashed", alone=True)
    assert not suspicion.suspects(1)


def test_an_answer_clears_its_prompt() -> None:
    suspicion = Suspicion()
    for times in range(2):
        suspicion.died(1, "s0", times, "crashed", alone=True)
    suspicion.ended(1)
    assert not suspicion
    suspicion.died(1, "s0", 2, "crashed", alone=True)
    suspicion.check(1)


def test_servers_that_die_under_everything_are_ill_and_nobody_is_blamed() -> None:
    suspicion = Suspicion()
    for key in range(MAX_CONVICTED + 3):
        for times in range(5):
            suspicion.died(key, "s0", 10 * key + times, "broken weights", alone=True)
    for key in range(MAX_CONVICTED):
        with pytest.raises(PoisonRequest):
            suspicion.check(key)
    for key in range(MAX_CONVICTED, MAX_CONVICTED + 3):
        suspicion.check(key)
