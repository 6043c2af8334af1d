"""What a controller writes: a journal, and from time to time a snapshot that makes the journal before it needless.

append(record), settle() ─► the journal takes too long to replay ─► fork ─► child: snapshot-<n>, exit
                                    journal ─► journal-<first>                          │
settle() ◄── it ended well: what is older than the last two snapshots goes ◄────────────┘

consumes     records; the state, by a function that dumps it, at points where both agree
waits for    nothing. The child has the state of the moment of the fork (memory is copied on write), so the parent
             goes on at once: the pause is that of the fork, some milliseconds at a million rows
woken by     `settle`, after each request; it looks whether the child has ended
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from transfer_queue.failpoints import failpoint
from transfer_queue.net.messages import Ack, Admit, Clear, Commit, Drop, Lease, Mutation, Nack, Record
from transfer_queue.service.lifetime import die_with_parent
from transfer_queue.storage.journal import Journal, JournalFailed, Sections, distrusted, journal_files, sync_journals
from transfer_queue.storage.snapshot import snapshots, write_snapshot

log = logging.getLogger(__name__)

TAIL = 0.3
"""Seconds that the records after a snapshot may take to replay, by the estimate of `replay_seconds`."""

KEPT = 2
"""Snapshots that are kept: if the newest turns out to be damaged, the one before it and the journal since serve."""


def replay_seconds(mutation: Mutation) -> float:
    """What a record costs when it is replayed, on the slow side (measured: 2-core virtual machine)."""
    match mutation:
        case Commit(keys=names) | Clear(keys=names) | Ack(uids=names) | Nack(uids=names) | Drop(uids=names):
            rows = len(names)
        case Admit(groups=groups):
            rows = len(groups)
        case Lease(groups=count, uids=uids):
            rows = min(count, 1000) + len(uids)
        case _:
            rows = 0
    return 25e-6 + 2.5e-6 * rows


class History:
    """A journal with snapshots. See the module; the files are described in journal.py and snapshot.py.

    Invariant: at any moment, what `recover` needs to get the state after the last record back is on the file system.
    """

    lasting = True

    def __init__(
        self, path: Path, run: str, record: int, *, tail: float = 0.0, fsync: bool = False, fork: bool = False
    ) -> None:
        """Go on after `record`; what follows the newest snapshot takes `tail` seconds to replay. Without `fork`,
        snapshots are written at once, while the caller waits: for processes that have threads or much memory."""
        self._journal = Journal(path, first=record + 1, fsync=fsync)
        self._path, self._run, self._record = path, run, record
        self._fork = fork
        self._distrusted = distrusted(path).exists()
        self._tail = tail
        self._child: int | None = None
        self._thread: ThreadPoolExecutor | None = None

    def append(self, record: Record) -> None:
        self._journal.append(record)
        self._record = record.seq
        self._tail += replay_seconds(record.mutation)

    def sync(self) -> None:
        self._journal.sync()

    def begin_sync(self) -> tuple[Executor, Callable[[], None]]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "journal")
        return self._thread, self._journal.begin_sync()

    def settle(self, sections: Sections) -> None:
        if self._distrusted:
            self._write_anew(sections)
        elif self._child is not None:
            self._look_after_child()
        elif self._tail > TAIL:
            self.snapshot(sections)

    def snapshot(self, sections: Sections) -> None:
        """Begin a new journal, and write the state before it. A failure is logged, and costs only a slower restart."""
        self._tail = 0.0
        self._journal.rotate(self._record + 1)
        failpoint("snapshot.after_rotate")
        if not self._fork:
            try:
                write_snapshot(self._path, self._run, self._record, sections())
            except OSError as error:
                return log.warning("no snapshot after record %d: %s", self._record, error)
            return self._prune()
        parent = os.getpid()
        self._end_thread()
        try:
            self._child = os.fork()
        except OSError as error:
            return log.warning("no snapshot after record %d: cannot fork: %s", self._record, error)
        if self._child == 0:
            _write_in_child(parent, self._path, self._run, self._record, sections)

    def _write_anew(self, sections: Sections) -> None:
        """Before anything is promised, into new files: of the old ones nobody knows what is on the disk. Raises
        JournalFailed."""
        self._journal.rotate(self._record + 1)
        try:
            write_snapshot(self._path, self._run, self._record, sections())
            distrusted(self._path).unlink(missing_ok=True)
        except OSError as error:
            raise JournalFailed(error.errno, error.strerror, str(self._path)) from error
        self._distrusted, self._tail = False, 0.0
        self._prune()

    def close(self) -> None:
        """Close the journal; a snapshot that is being written is given up."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child = None
        self._end_thread()
        self._journal.close()

    def _end_thread(self) -> None:
        """A process that forks has one thread: a sync under way is waited for."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _look_after_child(self) -> None:
        assert self._child is not None
        pid, status = os.waitpid(self._child, os.WNOHANG)
        if not pid:
            return
        self._child = None
        if status == 0:
            self._prune()
        else:
            log.warning("a snapshot failed (%s); the next is tried in a while", _how(status))

    def _prune(self) -> None:
        """Remove all that is older than the last snapshots. What cannot be removed now goes next time."""
        found = snapshots(self._path)
        old = [file for _, file in found[KEPT:]]
        if len(found) >= KEPT:
            files, oldest = journal_files(self._path), found[KEPT - 1][0]
            old += [file for (_, file), (following, _) in pairwise(files) if following <= oldest + 1]
        for file in (*old, *self._path.parent.glob("snapshot-*.*[0-9]")):
            with contextlib.suppress(OSError):
                file.unlink()
            failpoint("snapshot.mid_prune")


def _write_in_child(parent: int, path: Path, run: str, record: int, sections: Sections) -> Any:
    """Write the snapshot and end, whatever happens: this copy of the controller must do nothing else.

    It gives up the descriptors first, so that no client takes a dead controller for a living one.
    """
    status = 1
    try:
        gc.disable()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                os.closerange(max(fd, 3), fd + 1)
        die_with_parent(parent)
        sync_journals(path)
        write_snapshot(path, run, record, sections())
        status = 0
    except BaseException as error:  # noqa: BLE001
        os.write(2, f"no snapshot after record {record}: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"its writer was ended by signal {os.WTERMSIG(status)}"
    return f"its writer ended with {os.WEXITSTATUS(status)}; see the log"
