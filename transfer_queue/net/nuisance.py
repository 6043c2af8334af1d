"""What strangers send (port scans, other protocols, wrong keys) is counted, and told once a minute at most."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

QUIET = 60.0
"""Seconds between two lines about the same thing: a flood must not fill the disk."""


class Nuisance:
    """One kind of it at one socket. `count` is how often it happened."""

    def __init__(self, log: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`what` completes the line "<what> (<count> so far)"."""
        self.count = 0
        self._log = log
        self._what = what
        self._clock = clock
        self._told = -QUIET

    def note(self, detail: object = "") -> None:
        """It happened once more."""
        self.count += 1
        now = self._clock()
        if now - self._told >= QUIET:
            self._told = now
            self._log.warning("%s (%d so far)%s", self._what, self.count, f": {detail}" if detail else "")
