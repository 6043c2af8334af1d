"""A sign of life in the event log, every two seconds, so that silence means something."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from streamrl.monitor.events import EventLog

SECONDS = 2.0


@contextmanager
def heartbeat(events: EventLog, seconds: float = SECONDS) -> Iterator[None]:
    """Beats from a thread of its own, so also while the loop computes. A log on another clock than the machine's gets
    none: its times are not comparable with anybody's."""
    if events.directory is None or events.clock is not time.monotonic:
        yield
        return
    stop = threading.Event()

    def beat() -> None:
        number = 0
        while not stop.wait(seconds):
            number += 1
            events.counter("heartbeat", number)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
