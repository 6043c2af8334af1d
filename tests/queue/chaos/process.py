"""Simulated processes, and the parts of the product's clients that are replaced in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from tests.queue.chaos.loop import SeededLoop
from tests.queue.chaos.network import SimLink
from transfer_queue.client import QueueClient
from transfer_queue.errors import QueueError, SegmentGone
from transfer_queue.net.messages import VERSION, Hello
from transfer_queue.net.transport import SocketTransport

if TYPE_CHECKING:
    from tests.queue.chaos.world import World


class Killed(BaseException):
    """Ends what a killed process was doing. No `except` of the product stands in its way."""


class Process:
    """A simulated process. `links` are its connections."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.dead = False
        self.links: list[SimLink] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.closing: list[Callable[[], None]] = []

    def kill(self, *, noticed: bool = True) -> None:
        """SIGKILL. `noticed`: the controller hears of the process at once (a pidfd), not only of the connection."""
        if self.dead:
            return
        self.dead = True
        world = self.world
        world.note("dies", self.name)
        for task in self.tasks:
            task.cancel()
        for link in self.links:
            link.break_off()
            if noticed:
                world.loop.call_later(world.delay(), world.tell_of_death, link.client)
        for close in self.closing:
            close()

    async def connect(self, name: str = "") -> QueueClient:
        client = await QueueClient.connect(self.world.address, name=name or self.name, timeout=600.0)
        self.closing.append(client._access.release)
        return client


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class SimTransport(SocketTransport):
    """SocketTransport over a simulated connection of the process that makes it."""

    def _open(self) -> SimLink:  # pyright: ignore[reportIncompatibleMethodOverride]
        process = PROCESS.get()
        assert process is not None
        identity = process.world.new_identity(self.name)
        return SimLink(process, identity, on_up=self._greet, on_down=self._down, on_frame=self._on_frame)

    def _hello_body(self) -> Hello:
        return Hello(VERSION, self._address["run"], self._key, self.name, 0, "simulated")


class Elsewhere:
    """The bulk connection to a unit whose directory is gone: once it is started anew, it knows no old segment."""

    def __init__(self, endpoint: str, key: str, *, name: str, check_open: Any = None) -> None:
        pass

    async def read(self, segment: int, offset: int, nbytes: int) -> Any:
        await asyncio.sleep(1.0)
        raise SegmentGone(f"segment {segment:016x} was lost")

    async def write(self, segment: int, offset: int, data: Any) -> None:
        await self.read(segment, offset, len(data))

    def close(self, error: QueueError | None = None) -> None:
        pass


class Clock:
    def __init__(self, loop: SeededLoop) -> None:
        self.monotonic = loop.time
