"""An interrupt is acted upon whatever becomes of its exception."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from streamrl.runtime.interrupts import Interrupts


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_one_that_was_swallowed_while_starting_is_still_known() -> None:
    interrupts, stops = Interrupts(), []
    before = signal.getsignal(signal.SIGINT)
    with interrupts.taken():
        with contextlib.suppress(KeyboardInterrupt):
            interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        with interrupts.asking(lambda: stops.append(1)):
            assert stops == [1]
    assert signal.getsignal(signal.SIGINT) is before
    interrupts.check()


def test_the_first_asks_and_the_second_ends_at_once() -> None:
    interrupts, stops = Interrupts(), []
    with interrupts.asking(lambda: stops.append(1)):
        interrupt()
        assert stops == [1]
        interrupts.check()  # it was acted upon: an error that comes now is an error
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert stops == [1]


def test_a_later_run_of_the_process_begins_anew() -> None:
    interrupts, stops = Interrupts(), []
    for _ in range(2):
        with interrupts.asking(lambda: stops.append(1)):
            interrupt()
    assert stops == [1, 1]
