"""What is kept for the next read or write is let go when none comes: mappings, descriptors, memory of results.

consumes     `note_use` of whatever keeps something
produces     `sweep` while it is used, `release` once it was not for IDLE seconds
waits for    time, in one daemon thread of the process, which is there only as long as something is kept
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Protocol
from weakref import WeakKeyDictionary

log = logging.getLogger(__name__)

IDLE = 10.0
"""Seconds without use after which all is let go: the next use then costs some 50 ms per 256 MiB once."""

SWEEP_EVERY = 2.0
"""Seconds between looks for what is kept in vain."""


class Keeper(Protocol):
    """Methods are called from the daemon thread."""

    def sweep(self) -> None:
        """Let go of what will not be used again."""

    def release(self) -> None:
        """Let go of everything; nothing is kept from here to the next `note_use`."""


class _Watch:
    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._used: WeakKeyDictionary[Keeper, float] = WeakKeyDictionary()
        self._running = False

    def note_use(self, keeper: Keeper) -> None:
        with self._guard:
            self._used[keeper] = time.monotonic()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="queue-idle", daemon=True).start()

    def look(self) -> bool:
        """Sweep what is used, release what is not. Whether anything is left to watch."""
        with self._guard:
            used = list(self._used.items())
        for keeper, when in used:
            if time.monotonic() - when < IDLE:
                keeper.sweep()
                continue
            with self._guard:
                if self._used.get(keeper) != when:
                    continue
                del self._used[keeper]
            keeper.release()
        with self._guard:
            self._running = bool(self._used)
            return self._running

    def _run(self) -> None:
        going = True
        while going:
            time.sleep(SWEEP_EVERY)
            try:
                going = self.look()
            except Exception:  # the root of a thread: memory that is kept too long must not become memory kept for ever
                log.exception("what is kept for the next read or write could not be looked through")


_watch = _Watch()


def note_use(keeper: Keeper) -> None:
    """Watch `keeper` (weakly) until it was not used for IDLE seconds. Microseconds."""
    _watch.note_use(keeper)


def _after_fork() -> None:
    """A child has no threads of its parent."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_after_fork)
