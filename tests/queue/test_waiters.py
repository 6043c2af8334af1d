"""Requests that wait for their answer, by calls."""

from __future__ import annotations

import asyncio

import pytest

from transfer_queue.errors import DeadlineExceeded, QueueFull
from transfer_queue.net import messages as m
from transfer_queue.net.transport import ignore
from transfer_queue.net.waiters import Waiters


@pytest.mark.parametrize("kind", [DeadlineExceeded, QueueFull])
async def test_a_wait_over_two_lives_of_the_controller_is_told_with_all_its_time(kind):
    waiters = Waiters("c", "the controller", str)
    request, waiting = waiters.add(m.SegmentRequest(64, wait=20.0), 50.0)
    waiting.asked -= 23.0
    assert waiters.remaining(request) == m.SegmentRequest(64, wait=0.0)
    waiters.answer(request, m.Failed(kind.code, "'c' waited 0.0 s for a segment"))
    with pytest.raises(kind, match=r"waited 0.0 s for a segment \(23.0 s in all"):
        await waiting.future


async def test_who_has_less_patience_with_a_controller_that_serves_nobody_ends_sooner():
    waiters = Waiters("c", "the controller", lambda: "its disk is full")
    hasty, other = waiters.add(m.Stats(), 30.0, 0.05), waiters.add(m.Stats(), 30.0)
    waits = [asyncio.ensure_future(waiters.result(*one, ignore)) for one in (hasty, other)]
    await asyncio.sleep(0.1)
    assert not any(wait.done() for wait in waits)
    waiters.refused(True)
    later = waiters.add(m.Stats(), 30.0, 0.05)
    waits.append(asyncio.ensure_future(waiters.result(*later, ignore)))
    for wait in (waits[0], waits[2]):
        with pytest.raises(DeadlineExceeded, match="its disk is full"):
            await asyncio.wait_for(wait, 5)
    assert not waits[1].done()
    waits[1].cancel()
    await asyncio.wait(waits)
