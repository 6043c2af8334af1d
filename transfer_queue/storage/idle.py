"""What is kept for the next read or write is let go when none comes: mappings, descriptors, memory of results.

consumes     `note_use` of whatever keeps something
produces     `sweep` SWEEP_AFTER seconds after a use, one for all uses in between; `release` IDLE seconds after the last
waits for    the next of these, in one daemon thread of the process, which is there only as long as something is kept
woken by     time, and a use that needs a sweep sooner; without uses there is one sweep, one release, and no thread
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

SWEEP_AFTER = 2.0
"""Seconds from a use to a look for what is kept in vain: nobody says when a file that is mapped goes."""


class Keeper(Protocol):
    """Methods are called from the daemon thread."""

    def sweep(self) -> None:
        """Let go of what will not be used again."""

    def release(self) -> None:
        """Let go of everything; nothing is kept from here to the next `note_use`."""


class _Watch:
    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._used: WeakKeyDictionary[Keeper, float] = WeakKeyDictionary()
        self._sweep_at: float | None = None
        self._running = False

    def note_use(self, keeper: Keeper) -> None:
        now = time.monotonic()
        with self._changed:
            self._used[keeper] = now
            if self._sweep_at is None:
                self._sweep_at = now + SWEEP_AFTER
                self._changed.notify()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="queue-idle", daemon=True).start()

    def forget(self, keeper: Keeper) -> None:
        with self._changed:
            if self._used.pop(keeper, None) is not None:
                self._changed.notify()

    def look(self) -> None:
        """Sweep and release what is due."""
        now = time.monotonic()
        with self._changed:
            used = list(self._used.items())
            sweeps = self._sweep_at is not None and self._sweep_at <= now
            if sweeps:
                self._sweep_at = None
        for keeper, when in used:
            if now - when < IDLE:
                if sweeps:
                    keeper.sweep()
                continue
            with self._changed:
                if self._used.get(keeper) != when:
                    continue
                del self._used[keeper]
            keeper.release()

    def _run(self) -> None:
        while self._wait():
            try:
                self.look()
            except Exception:  # the root of a thread: memory that is kept too long must not become memory kept for ever
                log.exception("what is kept for the next read or write could not be looked through")

    def _wait(self) -> bool:
        """Until something is due; False: nothing is left to watch."""
        with self._changed:
            while used := list(self._used.values()):  # once: a keeper may be collected between two looks
                due = min(used) + IDLE
                if self._sweep_at is not None:
                    due = min(due, self._sweep_at)
                left = due - time.monotonic()
                if left <= 0:
                    return True
                self._changed.wait(left)
            self._running, self._sweep_at = False, None
            return False


_watch = _Watch()


def note_use(keeper: Keeper) -> None:
    """Watch `keeper` (weakly) until it was not used for IDLE seconds. Microseconds."""
    _watch.note_use(keeper)


def forget(keeper: Keeper) -> None:
    """`keeper` keeps nothing any more. The thread ends if it was the last one."""
    _watch.forget(keeper)


def _after_fork() -> None:
    """A child has no threads of its parent."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_after_fork)
