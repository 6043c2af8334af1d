"""Group commit of files: whoever comes while a file is being synced shares the next sync with all others who came."""

from __future__ import annotations

import asyncio

from transfer_queue.errors import SegmentGone
from transfer_queue.storage.segments import OpenFile


class GroupSync:
    """Of one event loop. Invariant: one sync of a file at a time, which began after all who share it had come."""

    def __init__(self) -> None:
        self._running: dict[OpenFile, asyncio.Task[None]] = {}
        self._next: dict[OpenFile, asyncio.Task[None]] = {}

    async def sync(self, file: OpenFile) -> None:
        """What was written before this call is on the disk. Raises SegmentGone: nobody knows what the disk has of it,
        and the kernel may have forgotten the rest, so that a second try would prove nothing."""
        task = self._next.get(file)
        if task is None:
            task = asyncio.ensure_future(self._sync(file, self._running.get(file)))
            self._next[file] = task
        await asyncio.shield(task)

    async def _sync(self, file: OpenFile, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
        finally:
            task = self._next.pop(file)
        self._running[file] = task
        try:
            await asyncio.to_thread(file.sync)
        except OSError as error:
            raise SegmentGone(f"a segment could not be written to disk: {error.strerror}") from None
        finally:
            del self._running[file]
