"""Answers that wait until the journal is on the disk: one sync at a time, beside the loop, for all that came before it.

hold(record, client, frame) ─► turn_ends: no sync runs ─► core.begin_sync ─► a thread ─► release those it covers ─┐
                                     ▲                                                                            │
                                     └──────────────── the next, if somebody waits who came meanwhile ◄───────────┘

Who was answered by the last sync asks again at about the same time. So the next one waits for as many, a part of what
the last one took: else the first of them would have one for itself, and all others the one after it.

consumes     answers and orders, each with the record that it must not overtake
produces     the same, in order, by `release`
waits for    the disk; who waits for nothing there is answered meanwhile
woken by     the end of a sync
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from transfer_queue.controller.core import ControllerCore
from transfer_queue.failpoints import failpoint

GATHER = 0.1
"""Part of a sync's time for which the next one waits for company."""


class GroupCommit:
    """Invariant: what leaves was covered by a sync that began after its record was in the journal."""

    def __init__(self, core: ControllerCore, release: Callable[[list[tuple[str, bytes]]], None]) -> None:
        self._core, self._release = core, release
        self._held: list[tuple[int, str, bytes]] = []
        self._running: asyncio.Future[None] | None = None
        self._gathering: asyncio.TimerHandle | None = None
        self._expected = 0  # as many as the last sync released
        self._began, self._took = 0.0, 0.0
        self._loop = asyncio.get_running_loop()

    def hold(self, record: int, client: str, frame: bytes) -> None:
        """Keep a frame until that record is on the disk."""
        self._held.append((record, client, frame))

    def turn_ends(self) -> None:
        """See that a sync begins, now or soon, if somebody waits for one."""
        if not self._held or self._running is not None:
            return
        if len(self._held) >= self._expected:
            self._begin()
        elif self._gathering is None:
            self._gathering = self._loop.call_later(GATHER * self._took, self._begin)

    def close(self) -> None:
        """What waits is not sent: its clients ask again."""
        self._held.clear()
        self._stop_gathering()
        if self._running is not None:
            self._running.cancel()

    def _begin(self) -> None:
        self._stop_gathering()
        failpoint("controller.before_sync")
        record, executor, work = self._core.begin_sync()
        self._began = self._loop.time()
        self._running = self._loop.run_in_executor(executor, work)
        self._running.add_done_callback(partial(self._ended, record))

    def _stop_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _ended(self, record: int, sync: asyncio.Future[None]) -> None:
        """Raises JournalFailed, which ends the process: nobody knows what the disk has."""
        self._running = None
        if sync.cancelled():
            return
        sync.result()
        failpoint("controller.after_sync")
        self._core.synced(record)
        self._took = self._loop.time() - self._began
        covered = [(client, frame) for needed, client, frame in self._held if needed <= record]
        self._held = [held for held in self._held if held[0] > record]
        self._expected = len(covered)
        self._release(covered)
