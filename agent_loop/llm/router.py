"""Which LLM server takes the next request: a state machine without I/O.

    healthy ──fail(ticket)──► out ──readmit(version ≥ current)──► healthy (next incarnation)

The shell around it, with calls, retries and health probes, is `llm/client.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

STICKY_REQUESTS = 4.0
"""A session leaves its server once that carries this many requests of the session's own size more than the least
loaded one. Moving costs one prefill of the session's tokens; four such requests ahead of it cost more."""

MAX_SESSIONS = 16_384
"""Sessions remembered for stickiness; the least recently used is forgotten (it only loses its prefix cache)."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request in flight. Every ticket is released exactly once."""

    number: int
    server: str
    incarnation: int
    tokens: int


@dataclass(slots=True)
class ServerState:
    version: int = 0
    healthy: bool = True
    incarnation: int = 0
    tokens: int = 0
    requests: int = 0
    last_chosen: int = 0
    reason: str = ""


class Router:
    """Least load by tokens in flight; ties rotate; sessions are sticky within a bound.

    Invariants:
    - a server's load is the sum of its unreleased tickets, across failures and re-admissions;
    - a ticket is only ever given for a healthy server;
    - a server that failed is out at once, and comes back only by `readmit` with at least the version in service;
    - a failure reported for an older incarnation does not take the re-admitted server out.
    """

    def __init__(self, servers: Iterable[str] = (), *, sticky_requests: float = STICKY_REQUESTS) -> None:
        self.servers: dict[str, ServerState] = {name: ServerState() for name in servers}
        self.version = 0
        """The newest weight version seen in service."""
        self._sticky_requests = sticky_requests
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._tickets: dict[int, ServerState] = {}
        self._count = 0

    def add(self, server: str, *, healthy: bool = False) -> None:
        """A server joins; unless stated otherwise it is out until a health check has passed."""
        self.servers[server] = ServerState(healthy=healthy, reason="" if healthy else "not yet checked")

    def remove(self, server: str) -> None:
        """A server leaves for good. Its tickets are still released, and count for no server of the same name."""
        self.servers.pop(server, None)

    def acquire(self, session: str, tokens: int) -> Ticket | None:
        """A place for a request of `tokens` (prompt plus budget), or None while no server is healthy."""
        healthy = [name for name, state in self.servers.items() if state.healthy]
        if not healthy:
            return None
        least = min(healthy, key=lambda name: (self.servers[name].tokens, self.servers[name].last_chosen))
        chosen = self._stuck_to(session, tokens, self.servers[least].tokens) or least
        self._remember(session, chosen)
        self._count += 1
        state = self.servers[chosen]
        state.last_chosen = self._count
        state.tokens += tokens
        state.requests += 1
        ticket = Ticket(self._count, chosen, state.incarnation, tokens)
        self._tickets[ticket.number] = state
        return ticket

    def release(self, ticket: Ticket) -> None:
        """The request is over, however it ended. Raises KeyError for a ticket that was released before."""
        state = self._tickets.pop(ticket.number)
        state.tokens -= ticket.tokens
        state.requests -= 1

    def fail(self, ticket: Ticket, reason: str) -> bool:
        """The ticket's server is gone; called before `release`. True if that took it out just now, False if it was out
        already or has come back since."""
        state = self.servers.get(ticket.server)
        if state is not self._tickets.get(ticket.number) or not state or not state.healthy:
            return False
        if state.incarnation != ticket.incarnation:
            return False
        state.healthy = False
        state.reason = reason
        return True

    def readmit(self, server: str, version: int) -> bool:
        """A health check passed with `version`. False if that is older than the version in service: it stays out."""
        state = self.servers.get(server)
        if state is None:
            return False
        state.version = version
        if version < self.version:
            state.reason = f"holds weight version {version} while {self.version} is in service"
            return False
        if not state.healthy:
            state.healthy = True
            state.incarnation += 1
            state.reason = ""
        self.version = version
        return True

    def observe(self, server: str, version: int) -> None:
        """A token of `server` carried `version`."""
        self.version = max(self.version, version)
        if server in self.servers:
            self.servers[server].version = version

    def in_flight(self) -> int:
        """Tickets not yet released."""
        return len(self._tickets)

    def out(self) -> dict[str, str]:
        """The servers that are out, and why."""
        return {name: state.reason for name, state in self.servers.items() if not state.healthy}

    def _stuck_to(self, session: str, tokens: int, least: int) -> str | None:
        name = self._sessions.get(session)
        state = self.servers.get(name) if name else None
        if state is None or not state.healthy:
            return None
        return name if state.tokens - least <= self._sticky_requests * tokens else None

    def _remember(self, session: str, server: str) -> None:
        self._sessions[session] = server
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
