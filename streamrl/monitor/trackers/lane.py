"""A tracker in a thread of its own, behind a bounded queue."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from streamrl.monitor.trackers.base import TakesSamples, Tracker

logger = logging.getLogger(__name__)

CAPACITY = 256
"""Calls that wait for a tracker: some hundred numbers each, so that a hanging one holds no more than some MiB."""

CLOSE_SECONDS = 10.0
"""What the end of a run waits for its trackers, together."""

Call = Callable[[Tracker], None]


class Lane:
    """Consumes: calls of the trainer. Waits for: them. Woken by: each of them, and `end`.

    Invariants: no call of the trainer waits or raises; at most `capacity` calls wait, the newest ones; what was not
    logged is counted.
    """

    def __init__(
        self, name: str, make: Callable[[], Tracker], tell: Callable[[str], None], *, capacity: int = CAPACITY
    ) -> None:
        """`make` is called in the thread, too. `tell` gets a line for the user, from any thread."""
        self.name = name
        self.dropped = 0
        """Calls that the tracker was too slow for."""
        self.failed = 0
        """Calls that raised."""
        self._make, self._tell = make, tell
        self._waiting: deque[Call] = deque()
        self._capacity = capacity
        self._changed = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        with self._changed:
            if self._over:
                return
            full = len(self._waiting) == self._capacity
            if full:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(call)
            self._changed.notify()
        if full and self.dropped == 1:
            self._tell(
                f"tracker {self.name} does not keep up: {self._capacity} calls wait for it, and the oldest leave from "
                "now on; metrics.jsonl has everything"
            )

    def end(self) -> None:
        """No further calls: the tracker takes those that wait, and finishes."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def join(self, seconds: float) -> None:
        """Wait at most so long, then leave the tracker alone, and say what it did not take."""
        self._thread.join(max(0.0, seconds))
        lost = [(self.dropped, "were dropped"), (self.failed, "failed")]
        if self._thread.is_alive():
            lost.append((len(self._waiting) + 1, "had not ended when the run did"))
        told = ", ".join(f"{count} calls {what}" for count, what in lost if count)
        if told:
            self._tell(f"tracker {self.name}: {told}; metrics.jsonl has everything")

    def _run(self) -> None:
        tracker = self._made()
        if tracker is None:
            return
        while (call := self._next()) is not None:
            try:
                call(tracker)
            except BaseException as error:  # noqa: BLE001  (a library's; SystemExit would end the thread without a word)
                self.failed += 1
                if self.failed == 1:
                    self._trouble(f"tracker {self.name} failed", error)
        try:
            tracker.finish()
        except BaseException as error:  # noqa: BLE001
            self._trouble(f"tracker {self.name} did not finish", error)

    def _made(self) -> Tracker | None:
        try:
            return self._make()
        except BaseException as error:  # noqa: BLE001
            self.end()
            with self._changed:
                self._waiting.clear()
            self._trouble(could_not_start(self.name), error)
            return None

    def _next(self) -> Call | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._over)
            return self._waiting.popleft() if self._waiting else None

    def _trouble(self, what: str, error: BaseException) -> None:
        with suppress(Exception):  # what formats a traceback asks the error for its text, too
            logger.warning("%s", what, exc_info=error)
        self._tell(f"{what}: {type(error).__name__}: {text_of(error)}")


def text_of(error: BaseException) -> str:
    """What it says, in one short line, also where asking it fails."""
    try:
        return " ".join(str(error).split())[:300]
    except BaseException as other:  # noqa: BLE001  (code of a library's)
        return f"(its text cannot be had: {type(other).__name__})"


def could_not_start(name: str) -> str:
    return f"tracker {name} could not start, and the run goes on without it"


class Trackers:
    """All trackers of a run."""

    def __init__(self, lanes: Sequence[Lane] = ()) -> None:
        self.lanes = list(lanes)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """What is no finite number is left out; metrics.jsonl has it as null."""
        if not self.lanes:
            return
        finite = {name: float(value) for name, value in metrics.items() if _finite(value)}
        for lane in self.lanes:
            lane.put(lambda tracker: tracker.log(finite, step))

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        shown = [dict(row) for row in rows]

        def call(tracker: Tracker) -> None:
            if isinstance(tracker, TakesSamples):
                tracker.samples(shown, step)

        for lane in self.lanes if shown else ():
            lane.put(call)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End all of them; returns after `seconds` at the latest."""
        deadline = time.monotonic() + seconds
        for lane in self.lanes:
            lane.end()
        for lane in self.lanes:
            lane.join(deadline - time.monotonic())
        self.lanes.clear()


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:  # a text
        return False
