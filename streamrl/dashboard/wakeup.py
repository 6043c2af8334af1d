"""Woken by the kernel when files of directories change (inotify); nothing is read or slept for meanwhile.

    with Wakeup() as wakeup:
        wakeup.watch(run_dir)
        await wakeup.wait(1.0)     # True: something changed; False: a second has passed

Where inotify cannot be had (no room for another watch) or sees nothing (files that another machine writes to a shared
disk), `wait` ends with its time, so a reader that then looks is late by that at most.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
from pathlib import Path
from typing import Self

logger = logging.getLogger(__name__)

CHANGES = 0x2 | 0x80 | 0x100 | 0x200
"""IN_MODIFY, IN_MOVED_TO, IN_CREATE, IN_DELETE."""

FLAGS = os.O_NONBLOCK | os.O_CLOEXEC

BUFFER = 1 << 16


class Wakeup:
    """Consumes: changes of directories (not of those below them). Waits for: the next one. One loop, one waiter."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(FLAGS)
        if self._fd < 0:
            logger.warning("no inotify (%s): changes are seen a little later", os.strerror(ctypes.get_errno()))
        self._watched: set[Path] = set()
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def watch(self, directory: Path) -> None:
        """Also wake for changes in this directory, from now on; nothing if it is not there (yet)."""
        if self._fd < 0 or directory in self._watched:
            return
        if self._libc.inotify_add_watch(self._fd, os.fsencode(directory), CHANGES) >= 0:
            self._watched.add(directory)
            self._changed.set()  # what came before the watch
        elif ctypes.get_errno() != errno.ENOENT:
            logger.warning("%s cannot be watched: %s", directory, os.strerror(ctypes.get_errno()))
            self._watched.add(directory)

    def wake(self) -> None:
        """End a wait by hand."""
        self._changed.set()

    async def wait(self, seconds: float) -> bool:
        """Whether something changed since the last wait, or does within `seconds`."""
        if self._loop is None and self._fd >= 0:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._drain)
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    def close(self) -> None:
        if self._fd >= 0:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drain(self) -> None:
        try:
            while os.read(self._fd, BUFFER):
                self._changed.set()
        except BlockingIOError:
            return
