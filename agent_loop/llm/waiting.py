"""The line of requests that no server may take yet.

consumes  a router's places          waits for  a release, a re-admission, a higher limit (`pump`)
produces  one ticket per request, first come first served

A request waits here and not in a server's own queue: so it goes to whichever server is free first, and does not die
with one that had not even begun it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from agent_loop.llm.awake import AwakeTime
from agent_loop.llm.protocol import ServerDied
from agent_loop.llm.router import Router, Ticket


class NoServer(ServerDied):
    """No server was in service until the deadline."""


@dataclass(slots=True, eq=False)
class _Place:
    session: str
    tokens: int
    version: int
    reserved: bool
    arrived: float
    ticket: asyncio.Future[Ticket]


class WaitingLine:
    """Invariants: nobody overtakes, but who needs a version that no server has holds up nobody, and who waits for a
    reserved server only those who do, too; a ticket is given to one request, and released here if that request is gone
    by then."""

    def __init__(self, router: Router, outage_seconds: float, awake: AwakeTime | None = None) -> None:
        """`outage_seconds`: how long a request waits while not a single server is in service; by the clock of `awake`,
        since one that comes back while all sleep is not needed before they wake up."""
        self._router, self._outage_seconds, self._awake = router, outage_seconds, awake or AwakeTime()
        self._places: dict[int, _Place] = {}
        self._reserved: dict[int, _Place] = {}
        self._numbers = count()
        self._outage: float | None = None
        self._closed = False
        self._fault: Exception | None = None

    def __len__(self) -> int:
        return len(self._places) + len(self._reserved)

    async def take(self, session: str, tokens: int, *, version: int = 0, reserved: bool = False) -> Ticket | None:
        """As `Router.acquire`; None once closed. Raises NoServer, or what `fail` was given."""
        if self._fault is not None:
            raise self._fault
        if self._closed:
            return None
        places = self._reserved if reserved else self._places
        if not places:
            ticket = self._router.acquire(session, tokens, version=version, reserved=reserved)
            if ticket is not None:
                return ticket
        number, turn = next(self._numbers), asyncio.get_running_loop().create_future()
        places[number] = place = _Place(session, tokens, version, reserved, self._awake.now(), turn)
        self.pump()
        try:
            return await self._turn(place)
        finally:
            places.pop(number, None)
            ticket = place.ticket
            if not ticket.done():
                ticket.cancel()

    def pump(self) -> None:
        """Something may have become free."""
        if self._closed or self._fault is not None:
            return
        for places in (self._places, self._reserved):
            for number, place in list(places.items()):
                ticket = self._router.acquire(
                    place.session, place.tokens, version=place.version, reserved=place.reserved
                )
                if ticket is not None:
                    del places[number]
                    place.ticket.set_result(ticket)
                elif not place.version:
                    break
        if len(self):
            self._note_outage()

    def close(self) -> None:
        """Who waits goes with nothing."""
        self._closed = True
        for place in (*self._places.values(), *self._reserved.values()):
            place.ticket.cancel()

    def fail(self, error: Exception) -> None:
        """Who waits, and who comes, gets this error: what would have to help them is broken."""
        self._fault = error
        for place in (*self._places.values(), *self._reserved.values()):
            if not place.ticket.done():
                place.ticket.set_exception(error)

    async def _turn(self, place: _Place) -> Ticket | None:
        clock = self._awake.now
        while True:
            began = max(place.arrived, clock() if self._outage is None else self._outage)
            try:
                with suppress(TimeoutError):
                    async with self._awake.limit(max(0.0, began + self._outage_seconds - clock())):
                        await asyncio.wait({place.ticket})
            except asyncio.CancelledError:
                self._give_back(place)
                raise
            if place.ticket.cancelled():
                return None
            if place.ticket.done():
                return place.ticket.result()
            self._note_outage()
            if self._outage is not None and clock() >= max(place.arrived, self._outage) + self._outage_seconds:
                out = "; ".join(f"{name}: {why}" for name, why in self._router.out().items()) or "there is no server"
                raise NoServer(
                    f"{place.session} waited {self._outage_seconds:g} s for a healthy LLM server ({out}); see the "
                    "servers' logs"
                )

    def _give_back(self, place: _Place) -> None:
        ticket = place.ticket
        if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
            self._router.release(ticket.result())
            self.pump()

    def _note_outage(self) -> None:
        if self._router.any_in_service():
            self._outage = None
        elif self._outage is None:
            self._outage = self._awake.now()
