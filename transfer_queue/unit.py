"""A storage unit: the process that makes, frees and serves segments for the controller.

    consumes     MakeSegments, FreeSegments (pushed by the controller); BulkRead, BulkWrite (from clients elsewhere)
    produces     SegmentsMade, RegisterUnit; bytes
    waits for    the controller and bulk requests
    woken by     messages only

Readers and writers on the same node map its files and need no answer from it, so its death stops nobody but writers
that want new segments. Without a controller for `patience` seconds it ends itself and leaves its files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from transfer_queue.errors import QueueError
from transfer_queue.net.bulk import BulkServer
from transfer_queue.net.messages import (
    FreeSegments,
    Keep,
    MakeSegments,
    Push,
    RegisterUnit,
    SegmentsMade,
    UnitInfo,
    Welcome,
)
from transfer_queue.net.transport import Transport, ZmqTransport, read_key
from transfer_queue.storage.unit_files import UnitFiles

log = logging.getLogger(__name__)

PATIENCE = 120.0
"""Seconds without a controller after which a unit ends."""


class Unit:
    """Joins a unit's files to a controller: in this process (LocalQueue) or over a socket."""

    def __init__(self, files: UnitFiles, endpoint: str, segment_bytes: int) -> None:
        self.files = files
        self._segment_bytes = segment_bytes
        self.info = UnitInfo(files.unit, str(files.directory), endpoint, files.nonce)
        self._pushes: asyncio.Queue[Push] = asyncio.Queue()
        self._files_free = asyncio.Lock()

    async def register(self, transport: Transport) -> None:
        """Tell the controller what is here and remove what it does not know. Orders of an earlier life are void."""
        async with self._files_free:
            self._pushes = asyncio.Queue()
            inventory = self.files.inventory()
            reply = await transport.request(RegisterUnit(self.info, self._segment_bytes, self.files.budget, inventory))
            assert isinstance(reply, Keep), reply
            self.files.keep(reply.segments)
        log.info("unit %d registered, %d segments kept", self.files.unit, len(reply.segments))

    def push(self, push: Push) -> None:
        """Take an order of the controller; done in order of arrival by `work`."""
        self._pushes.put_nowait(push)

    async def work(self, transport: Transport, in_thread: Callable = asyncio.to_thread) -> None:
        """Carry out pushes, for ever. Making a large segment takes a while, so it happens beside the loop."""
        while True:
            push = await self._pushes.get()
            if isinstance(push, FreeSegments):
                self.files.free(push.segments)
                continue
            answer = await in_thread(self._make, push)
            try:
                await transport.request(answer)
            except QueueError as error:  # a new controller has not seen this unit yet: it will ask again
                log.warning("unit %d: the controller did not take new segments: %s", self.files.unit, error)

    def _make(self, push: MakeSegments) -> SegmentsMade:
        try:
            return SegmentsMade(self.files.unit, self.files.make(push.count, push.nbytes))
        except OSError as error:
            message = f"{self.files.directory}: {error.strerror} for {push.count} x {push.nbytes} bytes"
            log.error("unit %d cannot make segments: %s", self.files.unit, message)
            return SegmentsMade(self.files.unit, [], message)


async def serve_unit(
    address: dict[str, str], *, unit: int, directory: Path, endpoint: str, budget: int, segment_bytes: int,
    stop: asyncio.Event, patience: float = PATIENCE,
) -> None:  # fmt: skip
    """Run one unit until `stop` is set or the controller stays away. Its files stay."""
    with contextlib.ExitStack() as closing:
        files = UnitFiles(directory, unit, budget=budget)
        closing.callback(files.close)
        bulk = BulkServer(files, endpoint, read_key(address["key_file"]))
        closing.callback(bulk.close)
        shell = Unit(files, endpoint, segment_bytes)
        news: asyncio.Queue[Welcome] = asyncio.Queue()
        transport = await ZmqTransport.connect(
            address, name=f"unit-{unit}", timeout=patience, on_push=shell.push,
            on_welcome=lambda welcome, _: news.put_nowait(welcome),
        )  # fmt: skip
        work = asyncio.create_task(shell.work(transport))
        await _register_until_stopped(shell, transport, news, work, stop)
        work.cancel()
        await transport.close()


async def _register_until_stopped(
    shell: Unit, transport: ZmqTransport, news: asyncio.Queue[Welcome], work: asyncio.Task, stop: asyncio.Event
) -> None:
    """Register under every epoch of the controller once; raise what ends the unit."""
    stopped = asyncio.create_task(stop.wait())
    epoch: int | None = None
    while not stopped.done():
        welcome = asyncio.create_task(news.get())
        await asyncio.wait([stopped, welcome, work], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        if not welcome.done():
            welcome.cancel()
            break
        if welcome.result().epoch != epoch:
            epoch = welcome.result().epoch
            await shell.register(transport)
