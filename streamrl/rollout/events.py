"""What a server tells the monitor: a hook of two arguments, and spans of busy time.

Events: `rollout.started` {version, slots}, `rollout.busy` {seconds, tokens} (a span that ends now),
`rollout.weights` {version, seconds}, `rollout.died` {reason}.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

EventHook = Callable[[str, dict[str, Any]], None]

SPAN_SECONDS = 1.0
"""An engine that never idles still reports this often, so that views are at most so far behind."""


def no_events(name: str, fields: dict[str, Any]) -> None:
    """The hook of a server nobody watches."""


class BusyMeter:
    """Sums the time of steps and reports it in spans; used from the engine's thread only."""

    def __init__(self, emit: EventHook) -> None:
        self.total = 0.0
        self._emit = emit
        self._span = 0.0
        self._tokens = self._tokens_before = 0

    def add(self, running: bool, began: float, tokens: int) -> None:
        """A step that began at `began` (perf_counter) has just ended; `tokens` were generated since the start."""
        if not running:
            return
        seconds = time.perf_counter() - began
        self.total += seconds
        self._span += seconds
        self._tokens = tokens
        if self._span >= SPAN_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Report the span so far, if any."""
        if self._span:
            self._emit("rollout.busy", {"seconds": self._span, "tokens": self._tokens - self._tokens_before})
        self._span, self._tokens_before = 0.0, self._tokens
