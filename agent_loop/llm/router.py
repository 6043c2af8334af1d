"""Which LLM server takes the next request: a state machine without I/O.

    healthy ──fail(ticket)──► out ──readmit(version ≥ current)──► healthy (next incarnation)

The shell around it, with calls, retries and health probes, is `llm/client.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

STICKY_REQUESTS = 4.0
"""A session leaves its server once that carries this many requests of the session's own size more than the least
loaded one. Moving costs one prefill of the session's tokens; four such requests ahead of it cost more."""

MAX_SESSIONS = 16_384
"""Sessions remembered for stickiness; the least recently used is forgotten (it only loses its prefix cache)."""

LARGEST_HEAP = 8
"""Entries per server of which most are no longer true; then it is made anew."""


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

    A request costs the logarithm of the number of servers: each change of a load is pushed on a heap, and what is no
    longer true is left out when it comes to the top.
    """

    def __init__(self, servers: Iterable[str] = (), *, sticky_requests: float = STICKY_REQUESTS) -> None:
        self.servers: dict[str, ServerState] = {name: ServerState() for name in servers}
        self.version = 0
        """The newest weight version seen in service."""
        self._sticky_requests = sticky_requests
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._tickets: dict[int, ServerState] = {}
        self._count = 0
        self._by_load: list[tuple[int, int, str]] = [(0, 0, name) for name in sorted(self.servers)]
        """(tokens, last_chosen, server); of every healthy server one at least that is true."""

    def add(self, server: str, *, healthy: bool = False) -> None:
        """A server joins; unless stated otherwise it is out until a health check has passed."""
        self.servers[server] = ServerState(healthy=healthy, reason="" if healthy else "not yet checked")
        self._push(server)

    def remove(self, server: str) -> None:
        """A server leaves for good. Its tickets are still released, and count for no server of the same name."""
        self.servers.pop(server, None)

    def acquire(self, session: str, tokens: int) -> Ticket | None:
        """A place for a request of `tokens` (prompt plus budget), or None while no server is healthy."""
        if (least := self._least_loaded()) is None:
            return None
        chosen = self._stuck_to(session, tokens, self.servers[least].tokens) or least
        self._remember(session, chosen)
        self._count += 1
        state = self.servers[chosen]
        state.last_chosen = self._count
        state.tokens += tokens
        state.requests += 1
        ticket = Ticket(self._count, chosen, state.incarnation, tokens)
        self._tickets[ticket.number] = state
        self._push(chosen)
        return ticket

    def release(self, ticket: Ticket) -> None:
        """The request is over, however it ended. Raises KeyError for a ticket that was released before."""
        state = self._tickets.pop(ticket.number)
        state.tokens -= ticket.tokens
        state.requests -= 1
        if self.servers.get(ticket.server) is state:
            self._push(ticket.server)

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
            self._push(server)
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

    def _least_loaded(self) -> str | None:
        while self._by_load:
            tokens, last_chosen, name = self._by_load[0]
            state = self.servers.get(name)
            if state and state.healthy and (state.tokens, state.last_chosen) == (tokens, last_chosen):
                return name
            heappop(self._by_load)
        return None

    def _push(self, server: str) -> None:
        state = self.servers[server]
        if state.healthy:
            heappush(self._by_load, (state.tokens, state.last_chosen, server))
        if len(self._by_load) > LARGEST_HEAP * (len(self.servers) + 1):
            healthy = [(name, state) for name, state in self.servers.items() if state.healthy]
            self._by_load = [(state.tokens, state.last_chosen, name) for name, state in healthy]
            heapify(self._by_load)

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
