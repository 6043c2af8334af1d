"""Requests in flight at one server: grown while its cache is clear, cut when it preempts."""

from __future__ import annotations

from random import Random

import pytest

from agent_loop.llm.protocol import ServerLoad
from streamrl.rollout.limits import LEAST, InFlightLimit


def load(running: int, *, slots: int = 256, preemptions: int = 0, cache_usage: float = 0.0) -> ServerLoad:
    return ServerLoad(running, 0, slots, 0, 0, 0.0, preemptions=preemptions, cache_usage=cache_usage)


def test_a_server_that_never_preempts_has_its_slots_and_their_spare() -> None:
    limit = InFlightLimit()
    assert [limit.update(load(256)) for _ in range(3)] == [320] * 3
    assert InFlightLimit().update(load(1, slots=1)) == 1 + LEAST


def test_a_preemption_cuts_what_was_in_flight_once_and_a_clear_cache_grows_again() -> None:
    limit = InFlightLimit()
    limit.update(load(100))
    assert limit.update(load(100, preemptions=5)) == 70
    assert limit.update(load(70, preemptions=5, cache_usage=0.95)) == 70
    assert limit.update(load(70, preemptions=5, cache_usage=0.8)) == 78
    assert limit.update(load(78, preemptions=6)) == 54


def test_a_restarted_server_that_counts_from_zero_is_not_cut() -> None:
    limit = InFlightLimit()
    limit.update(load(100, preemptions=7))
    assert limit.update(load(0, preemptions=0)) == 320


@pytest.mark.parametrize("fits", [10, 40, 150])
def test_the_limit_settles_around_what_the_cache_holds(fits: int) -> None:
    random, limit, preemptions = Random(fits), InFlightLimit(), 0
    limit.update(load(0))
    seen: list[int] = []
    for beat in range(400):
        assert limit.requests is not None
        running = limit.requests
        if running > fits * random.uniform(0.95, 1.05):
            preemptions += running - fits
        limit.update(load(running, preemptions=preemptions, cache_usage=min(1.0, running / fits)))
        if beat > 50:
            seen.append(running)
    assert 0.6 * fits <= sum(seen) / len(seen) <= 1.05 * fits
    assert max(seen) <= 1.2 * fits + 8
