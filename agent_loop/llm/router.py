"""Which LLM server takes the next request: a state machine without I/O.

    out ──readmit(version ≥ current)──► probation ──first tokens (observe, served)──► serving ◄─(un)drain─► draining
     ▲                                      │                                            │
     └──────────── fail(ticket), eject ─────┴────────────────────────────────────────────┘

The shell around it, with calls, retries and health probes, is `llm/client.py`.

*Several agent workers* have a router each, and a request asks nobody: a round trip per request would cost more than an
uneven server does, and a shared router would be one more process that can die. Once a beat each router says what it
holds (`held`) and is told what all the others hold together (`hear`). Between two beats a router takes it that the
others do as it does: what its own load has changed since counts once for each of them. So several routers that see the
same idle server fill it together to the level of the rest, instead of each filling it alone; a wrong guess lasts one
beat. Ties rotate from another server in each (`offset`). Simulated (benchmarks/rollout/router.py: 64 servers, as many
requests as slots on average, a beat a second), the slots in use over those of an oracle: 0.996 with one router; 0.984
with 4 and 0.972 with 8; 0.964 and 0.938 if they do not hear of each other. If each takes the last beat for the present,
all run to the same server: of 64 requests by 4 routers on 8 servers the busiest one then holds 60 % more than the mean,
not 18 %.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

STICKY_REQUESTS = 4.0
"""A session leaves its server once that carries this many requests of the session's own size more than the least
loaded one. Moving costs one prefill of the session's tokens; four such requests ahead of it cost more."""

MAX_SESSIONS = 16_384
"""Sessions remembered for stickiness; the least recently used is forgotten (it only loses its prefix cache)."""

PROBATION_REQUESTS = 1
"""Of a router at a server that has yet to show a token: what it may lose once more."""

MAX_LAG = 1
"""Versions behind the newest at which a server is still used like any other: while a version is handed out, half of the
servers are one behind."""

_TURNS = 32
"""Low bits of a key: when the server was chosen last. Above them its load in tokens, then whether it is avoided."""
_HEAVIEST = (1 << 29) - 1
_AVOIDED = 1 << 61
_CLOSED = (1 << 63) - 1

Status = Literal["serving", "probation", "draining", "out"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in flight. Every ticket is released exactly once."""

    number: int
    server: str
    incarnation: int
    tokens: int
    state: ServerState | None
    """None once released."""


@dataclass(slots=True, eq=False)
class ServerState:
    place: int
    status: Status = "serving"
    version: int = 0
    incarnation: int = 0
    tokens: int = 0
    requests: int = 0
    last_chosen: int = 0
    reason: str = ""
    failures: int = 0
    """In a row, without a token between them."""
    broken: int = 0
    """Answers in a row that no server may give (answers.py), without a good one between them."""
    lags: bool = False
    """More than `max_lag` versions behind, by the last beat."""
    reserved: bool = False
    """For requests that ask for a reserved server."""
    max_requests: int | None = None
    max_tokens: int | None = None
    """In flight at this server, over all routers; None: no limit."""
    others_requests: int = 0
    others_tokens: int = 0
    told_requests: int = 0
    told_tokens: int = 0
    """What this router held when `others_*` was added up."""

    @property
    def in_service(self) -> bool:
        return self.status == "serving" or self.status == "probation"


@dataclass(frozen=True, slots=True)
class ServerNews:
    """What a beat tells of one server. `others_*`: in flight there by the other routers; `told_*`: by this one, when
    those were added up."""

    version: int = 0
    max_requests: int | None = None
    max_tokens: int | None = None
    others_requests: int = 0
    others_tokens: int = 0
    told_requests: int = 0
    told_tokens: int = 0


@dataclass(slots=True)
class Router:
    """Least load by tokens in flight; ties rotate; sessions are sticky within a bound.

    Invariants:
    - a server's `tokens` and `requests` are those of its unreleased tickets, across failures and re-admissions;
    - a ticket is only ever given for a server in service that is below its limits; of those of the newest versions, if
      there is one, and never below the version that the request needs; a reserved server only gets requests that ask
      for one, and they go to no other while one is known;
    - a server that failed is out at once, and comes back only by `readmit` with at least the version in service; until
      its first token it holds one request at most;
    - a failure reported for an older incarnation does not take the re-admitted server out;
    - whatever the others hold, a router may hold its share of a server's limit, so none starves.

    A request costs one argmin over an array with a number per server, and no more for the limits, lags and drains,
    which are in that number.
    """

    first: Iterable[str] = ()
    sticky_requests: float = STICKY_REQUESTS
    max_lag: int = MAX_LAG
    offset: int = 0
    servers: dict[str, ServerState] = field(init=False, default_factory=dict)
    version: int = field(init=False, default=0)
    """The newest weight version seen in service."""
    routers: int = field(init=False, default=1)
    """That share the servers, this one included."""
    _sessions: OrderedDict[str, str] = field(init=False, default_factory=OrderedDict)
    _names: list[str] = field(init=False, default_factory=list)
    _keys: np.ndarray = field(init=False)
    _cells: memoryview = field(init=False)
    """The same numbers: reading or writing one of them costs a third of what it costs in an array."""
    _reserved: frozenset[str] = field(init=False, default=frozenset())
    _count: int = field(init=False, default=0)
    _held: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        names = sorted(self.first)
        self._set_keys([])
        for name in names:
            self.add(name, healthy=True)
        for place, name in enumerate(names):
            self.servers[name].last_chosen = (place - self.offset) % len(names)
            self._weigh(self.servers[name])
        self._count = len(names)

    # --- who serves -------------------------------------------------------------------------------------------

    def add(self, server: str, *, healthy: bool = False) -> None:
        """A server joins; unless stated otherwise it is out until a health check has passed."""
        self.remove(server)
        state = ServerState(len(self._names), "serving" if healthy else "out", reason="" if healthy else NOT_CHECKED)
        state.last_chosen, state.reserved = self._count, server in self._reserved
        self.servers[server] = state
        self._names.append(server)
        self._set_keys([*self._cells, _CLOSED])
        self._weigh(state)

    def remove(self, server: str) -> None:
        """A server leaves for good. Its tickets are still released, and count for no server of the same name."""
        state = self.servers.pop(server, None)
        if state is None:
            return
        last = self._names.pop()
        if last != server:  # the last one takes its place
            self._names[state.place] = last
            self._cells[state.place] = self._cells[-1]
            self.servers[last].place = state.place
        self._set_keys(list(self._cells)[:-1])
        state.place = -1

    def fail(self, ticket: Ticket, reason: str, *, broken: bool = False) -> bool:
        """The ticket's server is gone; called before `release`. True if that took it out just now, False if it was out
        already or has come back since. `broken`: by what it answered."""
        state = self.servers.get(ticket.server)
        if state is None or state is not ticket.state or state.incarnation != ticket.incarnation:
            return False
        if not self.eject(ticket.server, reason):
            return False
        state.broken += broken
        return True

    def eject(self, server: str, reason: str) -> bool:
        """A health check of the server failed. True if that took it out just now."""
        state = self.servers.get(server)
        if state is None or state.status == "out":
            return False
        state.status, state.reason = "out", reason
        state.failures += 1
        self._weigh(state)
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
        self.version = version
        if state.status == "out":
            state.status, state.reason, state.lags = "probation", "", False
            state.incarnation += 1
            self._weigh(state)
        return True

    def observe(self, server: str, version: int) -> None:
        """A token of `server` carried `version`."""
        self.version = max(self.version, version)
        state = self.servers.get(server)
        if state is None:
            return
        state.version = version
        state.failures = 0
        if state.status == "probation" or (state.lags and self.version - version <= self.max_lag):
            state.lags = False
            self._proven(state)

    def served(self, ticket: Ticket) -> None:
        """The ticket's request was answered."""
        state = ticket.state
        if state is not None and state.incarnation == ticket.incarnation:
            state.failures = state.broken = 0
            if state.status == "probation":
                self._proven(state)

    def drain(self, server: str) -> None:
        """No new requests from now on; those in flight go on. An unknown server is none that would get any."""
        if (state := self.servers.get(server)) is not None and state.in_service:
            state.status, state.reason = "draining", "it is drained"
            self._weigh(state)

    def undrain(self, server: str) -> None:
        """A drained server gets requests again; any other one stays what it is."""
        if (state := self.servers.get(server)) is not None and state.status == "draining":
            state.status, state.reason = "serving", ""
            self._weigh(state)

    def reserve(self, servers: Iterable[str]) -> None:
        """From now on these, and no others, are reserved. What is in flight there goes on."""
        self._reserved = frozenset(servers)
        for name, state in self.servers.items():
            state.reserved = name in self._reserved
            self._weigh(state)

    def hear(self, news: Mapping[str, ServerNews], routers: int) -> None:
        """A beat: of the servers that answered it. Tickets since then are added by `_weigh`."""
        self.routers = max(1, routers)
        newest = max((told.version for told in news.values()), default=0)
        self.version = max(self.version, newest)
        for name, told in news.items():
            if (state := self.servers.get(name)) is None:
                continue
            state.max_requests, state.max_tokens = told.max_requests, told.max_tokens
            state.others_requests, state.others_tokens = told.others_requests, told.others_tokens
            state.told_requests, state.told_tokens = told.told_requests, told.told_tokens
            state.version, state.lags = told.version, newest - told.version > self.max_lag
        for state in self.servers.values():
            self._weigh(state)

    # --- requests ---------------------------------------------------------------------------------------------

    def acquire(self, session: str, tokens: int, *, version: int = 0, reserved: bool = False) -> Ticket | None:
        """A place for a request of `tokens` (prompt plus budget) at a server with at least `version`, or None while no
        server may take it. `reserved`: at a reserved one, of whatever version, if there are any."""
        if reserved and not self._reserved.isdisjoint(self.servers):
            return self._acquire_reserved(session, tokens)
        if not self._names:
            return None
        place = int(self._keys.argmin())
        if self._cells[place] == _CLOSED:
            return None
        name = self._names[place]
        state = self.servers[name]
        home = self._sessions.get(session)
        if home is not None and home != name:
            stuck = self.servers.get(home)
            if stuck is not None and self._cells[stuck.place] != _CLOSED and stuck.lags <= state.lags:
                ahead = self._load(stuck) - self._load(state)
                if ahead <= self.sticky_requests * tokens:
                    name, state = home, stuck
        if state.version < version:
            found = self._least_at(version)
            if found is None:
                return None
            name, state = found
        return self._give(session, tokens, name, state, home)

    def _acquire_reserved(self, session: str, tokens: int) -> Ticket | None:
        fit = [name for name in self._reserved if (state := self.servers.get(name)) and state.in_service]
        fit = [name for name in fit if not self._is_full(self.servers[name])]
        if not fit:
            return None
        home = self._sessions.get(session)
        least = min(fit, key=lambda name: (self._load(self.servers[name]), self.servers[name].last_chosen))
        name = home if home in fit else least
        return self._give(session, tokens, name, self.servers[name], home)

    def _give(self, session: str, tokens: int, name: str, state: ServerState, home: str | None) -> Ticket:
        self._sessions[session] = name
        if home is not None:
            self._sessions.move_to_end(session)
        elif len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        self._count += 1
        self._held += 1
        state.last_chosen = self._count
        state.tokens += tokens
        state.requests += 1
        self._weigh(state)
        return Ticket(self._count, name, state.incarnation, tokens, state)

    def release(self, ticket: Ticket) -> None:
        """The request is over, however it ended. Raises KeyError for a ticket that was released before."""
        state = ticket.state
        if state is None:
            raise KeyError(f"ticket {ticket.number} of {ticket.server} was released before")
        ticket.state = None
        self._held -= 1
        state.tokens -= ticket.tokens
        state.requests -= 1
        self._weigh(state)

    def forget(self, session: str) -> None:
        """Its next request goes to the least loaded server."""
        self._sessions.pop(session, None)

    # --- what there is ----------------------------------------------------------------------------------------

    def in_flight(self) -> int:
        """Tickets not yet released."""
        return self._held

    def held(self) -> dict[str, tuple[int, int]]:
        """By server: requests and tokens of this router in flight."""
        return {name: (state.requests, state.tokens) for name, state in self.servers.items()}

    def out(self) -> dict[str, str]:
        """The servers that are out, and why."""
        return {name: state.reason for name, state in self.servers.items() if state.status == "out"}

    def draining(self) -> set[str]:
        return {name for name, state in self.servers.items() if state.status == "draining"}

    def any_in_service(self) -> bool:
        return any(state.in_service for state in self.servers.values())

    def _proven(self, state: ServerState) -> None:
        if state.status == "probation":
            state.status = "serving"
        self._weigh(state)

    def _load(self, state: ServerState) -> int:
        if self.routers == 1:
            return state.tokens
        others = state.others_tokens + (self.routers - 1) * (state.tokens - state.told_tokens)
        return state.tokens + (others if others > 0 else 0)

    def _is_full(self, state: ServerState) -> bool:
        if state.status == "probation" and state.requests >= PROBATION_REQUESTS:
            return True
        own, routers = state.requests, self.routers
        if (limit := state.max_requests) is not None and own >= max(1, limit // routers):
            others = state.others_requests + (routers - 1) * (own - state.told_requests)
            if own + max(0, others) >= limit:
                return True
        if (limit := state.max_tokens) is not None and own and state.tokens >= limit // routers:
            return self._load(state) >= limit
        return False

    def _weigh(self, state: ServerState) -> None:
        """Its key, anew: whether it may take a request, and how soon it should."""
        place, status = state.place, state.status
        if place < 0:
            return
        if (status != "serving" and status != "probation") or state.reserved or self._is_full(state):
            self._cells[place] = _CLOSED
            return
        load = state.tokens if self.routers == 1 else self._load(state)
        key = (load if load < _HEAVIEST else _HEAVIEST) << _TURNS | state.last_chosen & 0xFFFFFFFF
        self._cells[place] = key | _AVOIDED if state.lags else key

    def _set_keys(self, keys: list[int]) -> None:
        self._keys = np.array(keys, dtype=np.int64)
        self._cells = memoryview(self._keys)  # type: ignore[arg-type]  # an array is a buffer

    def _least_at(self, version: int) -> tuple[str, ServerState] | None:
        fit = [(self._cells[s.place], name, s) for name, s in self.servers.items() if s.version >= version]
        fit = [found for found in fit if found[0] != _CLOSED]
        return min(fit)[1:] if fit else None


NOT_CHECKED = "not yet checked"
