"""The sign of life in the event log."""

from __future__ import annotations

import time
from pathlib import Path

from streamrl.monitor.events import EventLog, read_events
from streamrl.monitor.heartbeat import heartbeat


def beats(path: Path) -> int:
    return sum(event.name == "heartbeat" for event in read_events(path))


def test_it_beats_while_the_block_computes_and_no_more_after_it(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events", "trainer") as log:
        with heartbeat(log, 0.01):
            deadline = time.monotonic() + 10
            while beats(tmp_path) < 3 and time.monotonic() < deadline:
                sum(range(10_000))
        found = beats(tmp_path)
        time.sleep(0.05)
        assert beats(tmp_path) == found >= 3


def test_a_log_on_a_clock_of_its_own_has_none(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events", "trainer", clock=lambda: 0.0) as log, heartbeat(log, 0.001):
        time.sleep(0.05)
    assert beats(tmp_path) == 0
