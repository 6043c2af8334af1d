"""A storage unit: the process that makes, frees and serves segments for the controller.

    consumes     MakeSegments, FreeSegments, Compact, SpillSegments (pushed by the controller); BulkRead, BulkWrite
                 (from clients elsewhere)
    produces     SegmentsMade, Compacted, Spilled, RegisterUnit; bytes
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

from transfer_queue.errors import Disconnected, QueueError
from transfer_queue.failpoints import failpoint
from transfer_queue.net.bulk import BulkServer
from transfer_queue.net.messages import (
    Compact,
    Compacted,
    FreeSegments,
    Keep,
    MakeSegments,
    Push,
    RegisterUnit,
    SegmentsMade,
    Spilled,
    SpillSegments,
    UnitInfo,
    Welcome,
)
from transfer_queue.net.transport import SocketTransport, Transport, read_key
from transfer_queue.storage.survivors import compact
from transfer_queue.storage.unit_files import UnitFiles

log = logging.getLogger(__name__)

PATIENCE = 120.0
"""Seconds without a controller after which a unit ends."""


class Unit:
    """Joins a unit's files to a controller: in this process (LocalQueue) or over a socket."""

    def __init__(self, files: UnitFiles, endpoint: str, segment_bytes: int, spill_budget: int = 0) -> None:
        self.files = files
        self._segment_bytes = segment_bytes
        spill = "" if files.disk is None else str(files.disk.directory)
        self.info = UnitInfo(files.unit, str(files.directory), endpoint, files.nonce, spill, files.incarnation)
        self._spill_budget = spill_budget if spill else 0
        self._pushes: asyncio.Queue[tuple[int, Push]] = asyncio.Queue()
        self._registrations = 0  # orders that came before the last one, or were sent before it, are void
        self._void = -1
        self._files_free = asyncio.Lock()

    async def register(self, transport: Transport) -> None:
        """Tell the controller what is here and remove what it does not know."""
        async with self._files_free:
            self._registrations += 1
            has = self.files.inventory(), self.files.spilled(), self._spill_budget
            failpoint("unit.before_register")
            reply = await transport.request(RegisterUnit(self.info, self._segment_bytes, self.files.budget, *has))
            assert isinstance(reply, Keep), reply
            self._void = reply.after
            failpoint("unit.after_register")
            self.files.keep(reply.segments)
        log.info("unit %d registered, %d segments kept", self.files.unit, len(reply.segments))

    def push(self, push: Push) -> None:
        """Take an order of the controller; done in order of arrival by `work`."""
        self._pushes.put_nowait((self._registrations, push))

    async def work(self, transport: Transport, in_thread: Callable = asyncio.to_thread) -> None:
        """Carry out pushes, for ever. Making a large segment takes a while, so it happens beside the loop."""
        while True:
            registration, push = await self._pushes.get()
            async with self._files_free:
                if registration != self._registrations or push.order <= self._void:
                    continue
                if isinstance(push, FreeSegments):
                    self.files.free(push.segments)
                    continue
                work = {MakeSegments: self._make, Compact: self._compact, SpillSegments: self._spill}[type(push)]
                answer = await in_thread(work, push)
                await self._report(transport, answer)

    async def _report(self, transport: Transport, made: SegmentsMade | Compacted | Spilled) -> None:
        """Say what was made. If the controller restarts meanwhile, this still comes before the next registration.

        A refusal is no reason to remove them: the controller that died may have granted them, and rows lie in them,
        before its answer came. The registration that follows says which are known.
        """
        try:
            await transport.request(made)
        except QueueError as error:
            log.warning("unit %d: the controller did not take new segments: %s", self.files.unit, error)

    def _make(self, push: MakeSegments) -> SegmentsMade:
        """Large ones are untouched: their writer does not map them at first, see UnitAccess.open_for_write."""
        touch, place = push.nbytes <= self._segment_bytes, self.files.directory
        try:
            if push.durable and self.files.disk is not None:
                place = self.files.disk.directory
                made = [self.files.make_on_disk(push.nbytes, durable=True) for _ in range(push.count)]
                return SegmentsMade(self.files.unit, made)
            return SegmentsMade(self.files.unit, self.files.make(push.count, push.nbytes, touch=touch))
        except OSError as error:
            message = f"{place}: {error.strerror} for {push.count} x {push.nbytes} bytes"
            log.error("unit %d cannot make segments: %s", self.files.unit, message)
            return SegmentsMade(self.files.unit, [], message)

    def _compact(self, push: Compact) -> Compacted:
        """Nothing is changed by a failure; the controller then leaves the survivors where they are."""
        try:
            segment, blocks = compact(self.files, push.batches, spilled=push.spilled)
        except (OSError, QueueError) as error:
            reason = f"{self.files.directory}: {error}"
            log.error("unit %d cannot move rows: %s", self.files.unit, reason)
            return Compacted(self.files.unit, None, [], reason)
        failpoint("unit.after_compact")
        return Compacted(self.files.unit, segment, blocks)

    def _spill(self, push: SpillSegments) -> Spilled:
        """In order, until one does not fit: what is not there then stays in memory."""
        done: list[int] = []
        try:
            for segment, end in push.segments:
                if self.files.spill(segment, end):
                    done.append(segment)
        except (OSError, QueueError) as error:
            assert self.files.disk is not None
            reason = f"{self.files.disk.directory}: {error.strerror if isinstance(error, OSError) else error}"
            log.error("unit %d cannot move segments to disk: %s", self.files.unit, reason)
            return Spilled(self.files.unit, done, reason)
        return Spilled(self.files.unit, done)


async def serve_unit(
    address: dict[str, str], *, unit: int, directory: Path, endpoint: str, budget: int, segment_bytes: int,
    spill: Path | None = None, spill_budget: int = 0,
    stop: asyncio.Event, ready: Callable[[], None] = lambda: None, patience: float = PATIENCE,
) -> None:  # fmt: skip
    """Run one unit until `stop` is set or the controller stays away for `patience` seconds. Its files stay."""
    with contextlib.ExitStack() as closing:
        files = UnitFiles(directory, unit, budget=budget, spill=spill)
        closing.callback(files.close)
        bulk = BulkServer(files, endpoint, read_key(address["key_file"]))
        closing.callback(bulk.close)
        shell = Unit(files, bulk.endpoint, segment_bytes, spill_budget)
        serving = asyncio.create_task(_serve(shell, address, ready, patience))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, stopped):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def _serve(shell: Unit, address: dict[str, str], ready: Callable[[], None], patience: float) -> None:
    """Register with every life of the controller, and again after each lost connection, since orders may have been lost
    with it; raise what ends the unit."""
    news: asyncio.Queue[Welcome | None] = asyncio.Queue()  # None: the connection was lost
    transport = await SocketTransport.connect(
        address, name=f"unit-{shell.files.unit}", timeout=patience, on_push=shell.push,
        on_welcome=lambda welcome, _: news.put_nowait(welcome), on_lost=lambda: news.put_nowait(None),
    )  # fmt: skip
    work = asyncio.create_task(shell.work(transport))
    work.add_done_callback(lambda _: news.put_nowait(None))
    epoch, connected = None, True
    try:
        while not work.done():
            async with asyncio.timeout(None if connected else patience):
                welcome = await news.get()
            connected = welcome is not None
            if welcome is None:
                epoch = None
            elif welcome.epoch != epoch:
                epoch = welcome.epoch
                await shell.register(transport)
                ready()
        work.result()
    except TimeoutError:
        raise Disconnected(f"the controller of run {address['run']!r} has been away for {patience:.0f} s") from None
    finally:
        work.cancel()
        await transport.close()
