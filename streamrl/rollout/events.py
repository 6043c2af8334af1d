"""What a server tells the monitor, in the names of `streamrl/monitor/schema.py`.

    span  server_busy     {server, tokens, scored}  the engine had running requests
    span  server_weights  {server, version}     the engine loaded new weights
    state server          {server}              "started", or "died: reason"

An `EventLog` is a `ServerEvents`; a test may pass any object with these two methods.
"""

from __future__ import annotations

from typing import Any, Protocol

SPAN_SECONDS = 1.0
"""A server that is never idle still reports about this often, so that views are no further behind."""


class ServerEvents(Protocol):
    def span_at(self, name: str, start: float, end: float, /, **fields: Any) -> None: ...

    def state(self, name: str, value: str | float, /, **labels: Any) -> None: ...


class NoEvents:
    """Of a server nobody watches."""

    def span_at(self, name: str, start: float, end: float, /, **fields: Any) -> None: ...

    def state(self, name: str, value: str | float, /, **labels: Any) -> None: ...


class Reporter:
    """One server's events and totals, and its busy time: stretches with running requests, joined into spans of a second
    or more.

    Times are those of the caller's clock: `time.monotonic` for an engine, the loop's for the simulation.
    """

    def __init__(self, server: str, events: ServerEvents | None) -> None:
        self.busy_seconds = self.queue_seconds = self.first_token_seconds = 0.0
        self.first_tokens = 0
        self._server = server
        self._events = events or NoEvents()
        self._start = self._end = 0.0
        self._tokens = self._tokens_before = self._scored = self._scored_before = 0
        self._open = False
        self._loaded: float | None = None

    def figures(self, now: float) -> dict[str, Any]:
        """The fields of a `ServerLoad` that are kept here."""
        if self._loaded is None:  # it has served what it was started with from the first question on, at least
            self._loaded = now
        return {
            "busy_seconds": self.busy_seconds,
            "first_tokens": self.first_tokens,
            "queue_seconds": self.queue_seconds,
            "first_token_seconds": self.first_token_seconds,
            "weights_seconds": max(0.0, now - self._loaded),
        }

    def first_token(self, waited: float, seconds: float) -> None:
        """A request has its first token, `seconds` after it came, of which it `waited` for a slot."""
        self.first_tokens += 1
        self.queue_seconds += waited
        self.first_token_seconds += seconds

    def started(self) -> None:
        self._events.state("server", "started", server=self._server)

    def died(self, reason: str) -> None:
        self._events.state("server", f"died: {reason}", server=self._server)

    def weights(self, start: float, end: float, version: int) -> None:
        self._loaded = end
        self._events.span_at("server_weights", start, end, server=self._server, version=version)

    def busy(self, start: float, end: float, tokens: int, *, scored: int = 0) -> None:
        """Requests were running from `start` to `end`; `tokens` were generated since the server started, and the
        log-probs of `scored` computed."""
        self.busy_seconds += end - start
        if not self._open:
            self._open, self._start = True, start
        self._end, self._tokens, self._scored = end, tokens, scored
        if self._end - self._start >= SPAN_SECONDS:
            self.idle()

    def idle(self) -> None:
        """Nothing runs any more: report the span so far, if there is one."""
        if self._open:
            made, scored = self._tokens - self._tokens_before, self._scored - self._scored_before
            self._events.span_at("server_busy", self._start, self._end, server=self._server, tokens=made, scored=scored)
        self._open, self._tokens_before, self._scored_before = False, self._tokens, self._scored
