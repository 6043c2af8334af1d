"""A controller that cannot write its journal: whoever wants it hears why, and it goes on once there is room.

consumes     Hellos, which clients and units repeat each second until they are welcomed
produces     Failed to each, with the disk, the file and what to do, and with `retry_after`: it is not final
waits for    room on the disk
woken by     a Hello: the kernel does not say when a disk has room again, so it is looked at when somebody asks
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from transfer_queue.errors import Disconnected, Invalid
from transfer_queue.net.codec import Malformed, decode_request, encode, failed_of
from transfer_queue.net.links import Listener
from transfer_queue.net.messages import Failed, Hello, Response
from transfer_queue.storage.journal import NO_ROOM, JournalFailed
from transfer_queue.storage.place import free_bytes

log = logging.getLogger(__name__)

ROOM = 1 << 20
"""Bytes that the disk must take again before the controller tries: a few thousand records."""

LOOK_EVERY = 0.2
"""Seconds between two looks at the disk at least, however many ask."""

RETRY_AFTER = 1.0
"""Seconds, told to who asks."""


async def until_room(
    listen: Callable[..., Listener], key: str, journal: Path, error: JournalFailed, stop: asyncio.Event
) -> None:
    """Return when the disk of `journal` has room, or at `stop`. `listen` makes the listener, given its callbacks."""
    asked = asyncio.Event()
    room = NoRoom(listen, key, journal, error, asked.set)
    log.error("nobody is served: %s", room.why())
    waits = [asyncio.ensure_future(event.wait()) for event in (stop, asked)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        room.close()


class NoRoom:
    """See the module. Calls `over` when a look finds room."""

    def __init__(
        self, listen: Callable[..., Listener], key: str, journal: Path, error: JournalFailed, over: Callable[[], None]
    ) -> None:
        self._key, self._journal, self._error, self._over = key, journal, error, over
        self._looked = -LOOK_EVERY
        self._listener = listen(
            on_frame=self._on_frame, on_turn=self._flush, on_end=lambda _: None, refuse=lambda _: None
        )

    def why(self) -> str:
        """What is wrong, where, and what to do."""
        disk = self._journal.parent
        remedy = "Make room there" if self._error.errno in NO_ROOM else "Repair that disk"
        return (
            f"the controller cannot write its journal {self._journal}: {self._error.strerror} (the disk at "
            f"{_mount_of(disk)} has {free_bytes(disk) >> 20} MiB free). {remedy}, and it goes on by itself; "
            "nothing that was acknowledged is lost"
        )

    def close(self) -> None:
        self._listener.close()

    def _on_frame(self, client: str, frame: bytes | memoryview, pid: int) -> None:
        try:
            request = decode_request(frame)
        except Malformed:
            return
        if not isinstance(request.body, Hello):
            return
        if hmac.compare_digest(request.body.key.encode(), self._key.encode()):
            reply = Failed(Disconnected.code, self.why(), RETRY_AFTER)
        else:
            reply = failed_of(Invalid("wrong key; give the key file of this run"))
        self._listener.send(client, encode(Response(request.id, reply)))
        self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked >= LOOK_EVERY:
            self._looked = now
            if has_room(self._journal.parent):
                log.info("there is room for the journal %s again", self._journal)
                self._over()

    def _flush(self) -> None:
        self._listener.flush()


def has_room(directory: Path) -> bool:
    """Whether the disk takes ROOM bytes, and a quota lets it."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM)
    except OSError:
        return False
    return True


def _mount_of(directory: Path) -> Path:
    """Where its file system is mounted."""
    return next(path for path in (directory, *directory.parents) if path.is_mount())
