"""How a client gets at the bytes of storage units: by mapping their segments, or over their sockets.

A unit is local if this process can read its nonce in its directory. `force_remote` (or TQ_FORCE_REMOTE=1 in the
environment) takes the other way although it is, so that reads across nodes are tested on every machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from pathlib import Path
from weakref import WeakValueDictionary

from transfer_queue.errors import Invalid, SegmentGone
from transfer_queue.failpoints import failpoint
from transfer_queue.net.bulk import BulkClient
from transfer_queue.net.messages import Block, Segment, UnitInfo
from transfer_queue.service.lifetime import boot_id
from transfer_queue.storage.arena import Extent, ReadArena, Target, verify, within
from transfer_queue.storage.idle import forget, note_use
from transfer_queue.storage.memory import ResultPool
from transfer_queue.storage.private import text_if_there
from transfer_queue.storage.segments import (
    FileCache,
    Mapping,
    OpenFile,
    incarnation_of,
    is_durable,
    pin_segment,
    unit_of,
)
from transfer_queue.storage.syncs import GroupSync

MAP_AT_ONCE = 16 << 20
"""Bytes up to which a segment is mapped when it comes for the first time. A larger one is written through its file, as
mapping pages that nobody has touched costs more than the copy; when the file comes again it is mapped."""


class UnitAccess:
    """Reads and writes bytes in segments of any unit it has heard of."""

    def __init__(self, name: str, key: str, *, force_remote: bool | None = None) -> None:
        self._name = name
        self._key = key
        self.check_open: Callable[[], None] = lambda: None
        """Raises QueueClosed where it is no use to wait for a unit: the queue has ended."""
        self._force_remote = os.environ.get("TQ_FORCE_REMOTE") == "1" if force_remote is None else force_remote
        self._units: dict[int, UnitInfo] = {}
        self._local: dict[int, bool] = {}
        self._bulk: dict[int, BulkClient] = {}
        self._written, self._read = FileCache(write=True), FileCache(write=False)
        self._mapped = ReadArena(self._map_for_read)
        self._syncs = GroupSync()
        self.results = ResultPool()
        self._guard = threading.Lock()  # sweep and release are called from a thread of their own
        self._pins: WeakValueDictionary[int, OpenFile] = WeakValueDictionary()  # as long as a view lives

    def learn(self, units: Iterable[UnitInfo]) -> None:
        """Take note of units, or of their new places."""
        for info in units:
            if self._units.get(info.unit) != info:
                self._units[info.unit] = info
                self._local[info.unit] = not self._force_remote and _can_read_nonce(info)
                old = self._bulk.pop(info.unit, None)
                if old is not None:
                    old.close(SegmentGone(f"storage unit {info.unit} was started anew"))

    def knows(self, segment: int) -> bool:
        """Whether it is known where the unit that made it is: another incarnation may be in another place."""
        info = self._units.get(unit_of(segment))
        return info is not None and info.incarnation == incarnation_of(segment)

    def open_for_write(self, segment: Segment) -> Target:
        """Where to write a granted segment; None if only over the wire. Raises SegmentGone."""
        if not self._is_local(segment.unit):
            return None
        note_use(self)
        info, durable = self._info(segment.unit), is_durable(segment.segment)
        with self._guard:
            mapping, known = self._written.open(info.spill if durable else info.directory, segment.segment)
        if durable:
            return mapping.file
        return mapping.data if known or segment.nbytes <= MAP_AT_ONCE else mapping.file

    async def upload(self, extents: Sequence[Extent]) -> None:
        """Send what was written to private buffers to the units; what lies in durable segments is on the disk when this
        returns. Raises SegmentGone, Disconnected."""
        if all(self._local[unit_of(s)] and not is_durable(s) for s in {extent.segment for extent in extents}):
            return  # it lies where it is to lie
        durable: set[OpenFile] = set()
        for extent in extents:
            unit = unit_of(extent.segment)
            if not self._local[unit]:
                assert extent.data is not None
                await self._bulk_client(unit).write(extent.segment, extent.offset, extent.data)
            elif is_durable(extent.segment):
                assert extent.file is not None
                durable.add(extent.file)
        for file in durable:
            failpoint("client.before_sync")
            await self._syncs.sync(file)

    async def fetch(self, blocks: list[Block], rows: Sequence[int]) -> list[memoryview]:
        """The bytes of each block, checked against their digests, of which so many rows will be copied; `check` must
        confirm them after the copy. Raises SegmentGone, Corrupt."""
        note_use(self)
        here = [self._is_local(unit_of(block.segment)) for block in blocks]
        with self._guard:
            mapped = iter(self._mapped.blocks(compress(blocks, here), compress(rows, here)))
        return [next(mapped) if near else await self._download(b) for b, near in zip(blocks, here, strict=True)]

    async def view(self, blocks: list[Block]) -> list[memoryview]:
        """The bytes of each block, unchecked and not copied: writable, seen by nobody else, and unchanged when the rows
        are cleared. Blocks of units elsewhere are fetched and checked. Raises SegmentGone."""
        views: dict[int, memoryview] = {}
        result = []
        for block in blocks:
            unit, segment = unit_of(block.segment), block.segment
            if not self._is_local(unit):
                result.append(await self._download(block))
                continue
            if segment not in views:
                pin = self._pins.get(segment)
                if pin is None:
                    info = self._info(unit)
                    pin = self._pins[segment] = pin_segment(info.directory, segment, info.spill)
                views[segment] = pin.private_view().data
            result.append(within(block, views[segment]))
        return result

    def check(self, blocks: Iterable[Block]) -> None:
        """Raise SegmentGone if bytes that `fetch` gave may have been reused before they were copied."""
        segments = {block.segment: block for block in blocks}
        with self._guard:
            self._mapped.check(block for number, block in segments.items() if self._is_local(unit_of(number)))

    def sweep(self) -> None:
        """Let go of memory whose segments are gone."""
        with self._guard:
            self._mapped.sweep()
            for files in (self._written, self._read):
                files.sweep()

    def release(self) -> None:
        """Let go of all that is kept for the next read or write."""
        with self._guard:
            self._mapped.clear()
            for files in (self._written, self._read):
                files.clear()

    def close(self) -> None:
        for keeper in (self, self.results):
            keeper.release()
            forget(keeper)
        for bulk in self._bulk.values():
            bulk.close()

    async def _download(self, block: Block) -> memoryview:
        data = await self._bulk_client(unit_of(block.segment)).read(block.segment, block.offset, block.nbytes)
        verify(block, data)
        return data.data

    def _map_for_read(self, segment: int) -> Mapping:
        info = self._info(unit_of(segment))
        return self._read.open(info.directory, segment, info.spill)[0]

    def _is_local(self, unit: int) -> bool:
        self._info(unit)
        return self._local[unit]

    def _bulk_client(self, unit: int) -> BulkClient:
        bulk = self._bulk.get(unit)
        if bulk is None:
            endpoint = self._info(unit).endpoint
            bulk = BulkClient(endpoint, self._key, name=self._name, check_open=self.check_open)
            self._bulk[unit] = bulk
        return bulk

    def _info(self, unit: int) -> UnitInfo:
        try:
            return self._units[unit]
        except KeyError:
            raise SegmentGone(f"storage unit {unit} has not registered with the controller") from None


def _can_read_nonce(info: UnitInfo) -> bool:
    """Its directory is here, and not only its name: on a disk that machines share, the boot id differs."""
    try:
        return info.nonce.startswith(boot_id()) and text_if_there(Path(info.directory, "nonce")) == info.nonce
    except (PermissionError, NotADirectoryError, Invalid):
        return False
