"""The requests of a server whose engine is another process, on one event loop: who waits, who has a slot, how it ends.

```
 generate ─► waiting ──a slot is free, nothing stands──► running ──► answered
                                                            ▲ the engine's own part: a subclass
 fail, close ─► every open call is ServerDied, and every later one
```

Requests wait here and not in the engine, so that one that begins after a swap is prefilled after it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from agent_loop.llm.protocol import Generation, ServerDied
from streamrl.rollout.events import Reporter

logger = logging.getLogger(__name__)

STALL_SECONDS = 120.0
"""A running engine that gives no token for so long is taken for hung; a prefill of a large model takes seconds."""


class Call(Protocol):
    """One request. Times are `time.perf_counter`'s."""

    id: str
    submitted: float
    admitted: float | None
    generation: Generation


C = TypeVar("C", bound=Call)


class Calls(ABC, Generic[C]):
    """Invariants: at most `slots` calls are in the engine; a call is answered exactly once; none begins while there is
    a reason to stand, or after the end."""

    engine_name: str

    def __init__(self, *, slots: int, version: int, report: Reporter) -> None:
        self.slots, self.version = slots, version
        self.open: dict[str, C] = {}
        self.failure: str | None = None
        self._waiting: dict[str, C] = {}
        self._running: dict[str, C] = {}
        self._stands: set[str] = set()
        """Reasons to stand."""
        self._changing = asyncio.Lock()
        """Held while the engine is paused, resumed or swapped."""
        self._report = report
        self._tokens = 0
        self._last_token = self._busy_from = time.monotonic()

    def fail(self, reason: str) -> ServerDied:
        """The end of the engine: open calls, and all that come, are ServerDied."""
        if self.failure is None:
            logger.error("%s failed: %s", self.engine_name, reason)
            self._report.died(reason)
            self._end(f"{self.engine_name} failed: {reason}")
        return ServerDied(self.failure)

    def close(self) -> None:
        if self.failure is None:
            self._end("the server was closed")

    def check_alive(self) -> None:
        if self.failure is not None:
            raise ServerDied(self.failure)

    def _end(self, reason: str) -> None:
        self.failure = reason
        self._report.idle()
        self._fail_open(reason)

    def _check_new(self, call_id: str) -> None:
        self.check_alive()
        if call_id in self.open:
            raise ValueError(f"request id {call_id!r} is already open here; ids must be unique per server")

    def _submit(self, call: C) -> None:
        self.open[call.id] = self._waiting[call.id] = call
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._slots_held() < self.slots and not self._stands and self.failure is None:
            call = self._waiting.pop(next(iter(self._waiting)))
            if not self._running:
                self._last_token = self._busy_from = time.monotonic()
            self._running[call.id] = call
            self._begin(call)

    def _forget(self, call: C) -> None:
        """Its id is free again; another call may have it already."""
        if self.open.get(call.id) is call:
            del self.open[call.id]
            self._waiting.pop(call.id, None)
            if self._running.pop(call.id, None) is not None and not self._running:
                self._report.idle()

    def _first_token(self, call: C) -> None:
        began = call.submitted if call.admitted is None else call.admitted
        self._report.first_token(began - call.submitted, time.perf_counter() - call.submitted)

    def _was_busy(self, now: float, *, scored: int = 0) -> None:
        """Until `now`; its tokens are counted already. `scored`: tokens whose log-probs were computed so far."""
        self._report.busy(self._busy_from, now, self._tokens, scored=scored)
        self._last_token = self._busy_from = now

    def _goes_on(self) -> None:
        """It stood, and stands no longer."""
        self._last_token = self._busy_from = time.monotonic()
        self._admit()

    def _figures(self) -> dict[str, Any]:
        """The fields of a `ServerLoad` that are known here. Raises ServerDied if the engine hangs."""
        now = time.monotonic()
        silent = now - self._last_token
        if self._running and not self._stands and silent > STALL_SECONDS:
            raise self.fail(f"no token for {silent:.0f} s with {len(self._running)} requests running")
        return {
            "running": len(self._running), "waiting": len(self._waiting), "slots": self.slots,
            "weight_version": self.version, "tokens_generated": self._tokens, "asleep": "asleep" in self._stands,
            **self._report.figures(now),
        }  # fmt: skip

    def _slots_held(self) -> int:
        return len(self._running)

    @abstractmethod
    def _begin(self, call: C) -> None:
        """It has a slot now."""

    @abstractmethod
    def _fail_open(self, reason: str) -> None:
        """Every open call is answered with ServerDied."""
