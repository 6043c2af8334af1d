"""Connections between simulated processes and the simulated controller: they delay, repeat and break, by the seed.

A connection keeps order, as a stream does, and what is on its way when it breaks is lost. A request may arrive twice,
one right after the other: later than that no connection repeats anything, and clients only what was not answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.queue.chaos.process import Process
    from tests.queue.chaos.world import World

TICK = 1e-6


class Wire:
    """One connection."""

    def __init__(self, world: World, link: SimLink, listener: SimListener) -> None:
        self.world, self.link, self.listener = world, link, listener
        self.whole = True
        self._last = {"up": 0.0, "down": 0.0}

    def carry(self, way: str, deliver: Callable[[bytes], None], frame: bytes) -> None:
        loop = self.world.loop
        when = max(self._last[way] + TICK, loop.time() + self.world.delay())
        self._last[way] = when
        loop.call_at(when, self._arrive, deliver, frame)

    def cut(self) -> None:
        """Both ends notice, some time later."""
        if self.whole:
            self.whole = False
            loop = self.world.loop
            loop.call_later(self.world.delay(), self.link.ended, self)
            loop.call_later(self.world.delay(), self.listener.ended, self)

    def _arrive(self, deliver: Callable[[bytes], None], frame: bytes) -> None:
        if self.whole:
            deliver(frame)


class SimLink:
    """A client's end; see net/links.py: Link."""

    def __init__(
        self, process: Process, identity: bytes, *, on_up: Callable[[], None], on_down: Callable[[], None],
        on_frame: Callable[[bytes], None],
    ) -> None:  # fmt: skip
        self.process, self.world = process, process.world
        self.client = identity.decode()
        self._on_up, self._on_down, self._on_frame = on_up, on_down, on_frame
        self._wire: Wire | None = None
        self._closed = False
        process.links.append(self)
        self._again()

    def send(self, frame: bytes, **_: object) -> bool:
        if self._wire is None:
            return False
        if not self.process.dead:
            wire = self._wire
            wire.carry("up", lambda frame: wire.listener.arrived(wire, frame), bytes(frame))
        return True

    def close(self) -> None:
        self._closed = True
        if self._wire is not None:
            self._wire.cut()
            self._wire = None

    def break_off(self) -> None:
        """The connection is lost, and nobody is dead."""
        if self._wire is not None:
            self._wire.cut()

    def ended(self, wire: Wire) -> None:
        if self._wire is wire:
            self._wire = None
            self._again()
            self._on_down()

    def arrived(self, frame: bytes) -> None:
        if not self.process.dead and not self._closed:
            self._on_frame(frame)

    def _again(self) -> None:
        if not self._closed and not self.process.dead:
            self.world.loop.call_later(self.world.random.uniform(0.001, 0.5), self._connect)

    def _connect(self) -> None:
        if self._closed or self.process.dead:
            return
        listener = self.world.listener
        if listener is None:
            return self._again()
        self._wire = Wire(self.world, self, listener)
        listener.accepted(self._wire)
        self._on_up()


class SimListener:
    """The controller's end; see net/links.py: Listener."""

    def __init__(
        self, world: World, *, on_frame: Callable[[str, bytes, int], None], on_turn: Callable[[], None],
        on_end: Callable[[str], None], refuse: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.world = world
        self.alive = True
        self._on_frame, self._on_turn, self._on_end = on_frame, on_turn, on_end
        self._wires: dict[str, Wire] = {}
        self._unsent: list[tuple[str, bytes]] = []
        self._turn_due = False

    def accepted(self, wire: Wire) -> None:
        before = self._wires.get(wire.link.client)
        if before is not None:
            before.cut()
        self._wires[wire.link.client] = wire

    def arrived(self, wire: Wire, frame: bytes) -> None:
        if not self.alive:
            return
        world = self.world
        if world.random.random() < world.repeats:
            world.loop.call_soon(self._repeated, wire, frame)
        self._handle(wire, frame)

    def send(self, client: str, frame: bytes) -> bool:
        if self.alive and client in self._wires:
            self._unsent.append((client, bytes(frame)))
            return True
        return False

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        for client, frame in unsent:
            wire = self._wires.get(client)
            if self.alive and wire is not None:
                wire.carry("down", wire.link.arrived, frame)

    def trust(self, client: str) -> None:
        pass

    def drain(self) -> None:
        pass

    def close(self) -> None:
        """The controller is gone: all connections end."""
        self.alive = False
        for wire in list(self._wires.values()):
            wire.cut()

    def ended(self, wire: Wire) -> None:
        client = wire.link.client
        if self._wires.get(client) is wire:
            del self._wires[client]
            if self.alive:
                self.world.as_controller(self._on_end, client)

    def _repeated(self, wire: Wire, frame: bytes) -> None:
        if self.alive and wire.whole:
            self._handle(wire, frame)

    def _handle(self, wire: Wire, frame: bytes) -> None:
        self.world.note("in", wire.link.client, len(frame))
        self.world.as_controller(self._on_frame, wire.link.client, frame, 0)
        if not self._turn_due:  # sometimes several requests are answered together
            self._turn_due = True
            self.world.loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        if self.alive:
            self.world.as_controller(self._on_turn)
