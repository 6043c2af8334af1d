"""Frames are seen once, in order, by everybody, however they come and go."""

from __future__ import annotations

import random

import pytest

from streamrl.dashboard.frames import FrameLog


def log_of(count: int, kept: int = 4) -> FrameLog:
    log = FrameLog(kept, life="life")
    for number in range(1, count + 1):
        log.add(b"%d" % number)
    return log


def test_who_knows_nothing_needs_a_snapshot() -> None:
    assert log_of(0).after(None) is None


def test_who_knows_all_gets_nothing() -> None:
    assert log_of(3).after(3) == []


def test_who_was_away_gets_what_he_missed_in_order() -> None:
    found = log_of(6).after(3)
    assert found is not None
    assert [frame.number for frame in found] == [4, 5, 6]


def test_who_was_away_for_too_long_needs_a_snapshot() -> None:
    assert log_of(6).after(1) is None


def test_a_number_from_the_future_needs_a_snapshot() -> None:
    assert log_of(3).after(9) is None


def test_after_what_no_frame_tells_everybody_needs_a_snapshot() -> None:
    log = log_of(3)
    log.forget()
    assert log.after(3) is None
    assert log.after(log.last) == []


def test_an_id_of_another_life_or_no_id_at_all_is_unknown() -> None:
    log = log_of(3)
    assert log.number_of(log.id_of(2)) == 2
    for identity in ("other.2", "2", "", "life.", "life.x", "life.-1", "life.²", "life." + "9" * 40):
        assert log.number_of(identity) is None, identity


@pytest.mark.parametrize("seed", [random.randrange(1 << 30)])
def test_a_client_that_comes_and_goes_sees_every_frame_once_or_a_snapshot_instead(seed: int) -> None:
    chance, log, known, seen = random.Random(seed), FrameLog(8), None, 0
    for _ in range(2000):
        for _ in range(chance.randrange(12)):
            log.add(b"")
        batch = log.after(known)
        if batch is None:
            seen = known = log.last
        else:
            assert [frame.number for frame in batch] == list(range(seen + 1, log.last + 1))
            seen = known = log.last
