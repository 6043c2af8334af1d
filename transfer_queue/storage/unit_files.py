"""A storage unit's directory: the segment files in it, made, freed and reused.

lock          held by the living unit (flock)
incarnation   grows whenever a unit is started here, from a random number on: part of each segment id, so that none
              comes twice, even if this directory is lost; with its digest (xxh3-64)
nonce         begins with the boot id: a client that can read it and has that boot id is on the same node, and maps
              segments instead of asking for bytes
*.seg         segments, by id
*.pool        freed segments whose pages are kept for the next grant (a fresh page costs five times a warm one)

Another directory, on disk, takes sealed segments when memory is short, and has those that are durable
(storage/spill.py). It has the incarnation too, so that ids are new after a reboot as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import xxhash

from transfer_queue.errors import Invalid, SegmentGone
from transfer_queue.failpoints import failpoint
from transfer_queue.net.messages import Segment
from transfer_queue.service.lifetime import boot_id, wait_for_exit
from transfer_queue.storage.journal import sync_directory
from transfer_queue.storage.private import open_regular, private_directory, text_if_there
from transfer_queue.storage.segments import (
    Mapping,
    is_durable,
    make_file,
    map_segment,
    rename_unpinned,
    segment_file,
    segment_id,
    segment_of,
)
from transfer_queue.storage.spill import SpillDirectory

log = logging.getLogger(__name__)


POOL_SHARE = 0.5
"""Part of the budget that may lie in pooled files: enough for the turnover of a step, and a peak is given back. They
give way to segments, so they are no part of what is held."""


class UnitFiles:
    """Invariants:

    - A segment id stands for one file and one grant, also over restarts of the unit.
    - A file is pooled only if it was made since the controller last registered this unit, so that the controller
      knows its writer to be done or dead; any other is unlinked (a writer that sleeps may still hold the mapping).
    - A file that a reader has pinned is not pooled: the reader's views keep its bytes after it is unlinked.
    - Segments and pool together never exceed `budget` bytes, and the pool alone never POOL_SHARE of it; those on disk
      count apart.
    - A segment is in memory or on disk; in both only while it is copied.
    """

    def __init__(self, directory: str | Path, unit: int, *, budget: int, spill: str | Path | None = None) -> None:
        """`spill`: the directory on disk, if any. Raises Invalid if another living unit holds the directory."""
        self.directory = Path(directory)
        self.unit = unit
        self.budget = budget
        private_directory(self.directory)
        self._lock = lock_file(self.directory / "lock", f"storage unit {unit}", wait=5.0)
        try:
            self._open(spill)
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self, spill: str | Path | None) -> None:
        """Find what is there. The lock is held."""
        self.nonce = self._read_or_make_nonce()
        self.disk = SpillDirectory(spill, self.nonce) if spill is not None else None
        self.incarnation = self._next_incarnation()
        self._counter = itertools.count()
        self._pool_counter = itertools.count()
        self._pool: dict[int, list[Path]] = defaultdict(list)
        self._poolable: set[int] = set()
        self._mappings: dict[int, Mapping] = {}
        for left in self.directory.glob("*.pool"):
            left.unlink()
        self._sizes = dict(self._scan())
        self._spilled: dict[int, int] = self.disk.sizes if self.disk is not None else {}
        for segment in self._sizes.keys() & self._spilled.keys():
            self._unlink_spilled(segment)  # it died between copy and unlink

    def inventory(self) -> list[tuple[int, int]]:
        """(segment, nbytes) of all segments in memory."""
        return sorted(self._sizes.items())

    def spilled(self) -> list[tuple[int, int]]:
        """(segment, nbytes) of all segments on disk."""
        return sorted(self._spilled.items())

    def keep(self, segments: Iterable[int]) -> None:
        """The controller (re)registered this unit: these have live rows, all others go."""
        for segment in set(self._sizes) - set(segments):
            self._unlink(segment)
            failpoint("unit.mid_keep")
        for segment in set(self._spilled) - set(segments):
            self._unlink_spilled(segment)
        self._poolable.clear()

    def make_for_survivors(self, nbytes: int, *, spilled: bool, durable: bool = False) -> Segment:
        """A new segment, in memory or on disk, that nobody else will write to. Raises OSError."""
        return self.make_on_disk(nbytes, durable=durable) if spilled else self.make(1, nbytes)[0]

    def make_on_disk(self, nbytes: int, *, durable: bool) -> Segment:
        """A new segment on disk. Raises OSError, and Invalid if this unit has no place there."""
        if self.disk is None:
            raise Invalid(f"unit {self.unit} has no directory on disk")
        segment = segment_id(self.unit, self.incarnation, next(self._counter), durable=durable)
        self.disk.make(segment, nbytes)
        return Segment(segment, self.unit, nbytes)

    def sync(self, segment: int) -> None:
        """What was written to a segment on disk outlives the machine when this returns. Raises OSError, SegmentGone."""
        assert self.disk is not None
        self.disk.sync(segment)

    def make(self, count: int, nbytes: int, *, touch: bool = True) -> list[Segment]:
        """New segments, `touch` as in make_file. Raises OSError when the directory is full, with those already made
        removed again."""
        made: list[Segment] = []
        try:
            for _ in range(count):
                made.append(self._make_one(nbytes, touch))
                failpoint("unit.mid_make")
        except OSError:
            for segment in made:
                self._unlink(segment.segment)
            self._shrink_pool(0)
            raise
        failpoint("unit.after_make")
        return made

    def free(self, segments: Iterable[int]) -> None:
        """No row lies in them any more and nobody writes to them. Unknown ones are ignored."""
        for segment in segments:
            nbytes = self._sizes.get(segment)
            if nbytes is not None:
                failpoint("unit.mid_free")
                self._release(segment, nbytes)
            elif segment in self._spilled:
                self._unlink_spilled(segment)

    def spill(self, segment: int, end: int) -> bool:
        """Move a sealed segment, of which `end` bytes were written, to disk; whether it is there. Raises OSError."""
        nbytes = self._sizes.get(segment)
        if nbytes is not None and self.disk is not None:
            self.disk.store(self.directory / segment_file(segment), segment, min(end, nbytes), nbytes)
            failpoint("unit.after_spill")
            self._release(segment, nbytes)
        return segment in self._spilled

    def read(self, segment: int, offset: int, nbytes: int) -> bytes:
        """A copy of bytes of a segment, certainly not reused while they were copied. Raises SegmentGone, Invalid."""
        mapping = self._mapping(segment)
        data = self._range(mapping, offset, nbytes).tobytes()
        if not mapping.stands():
            self._mappings.pop(segment, None)
            raise SegmentGone(f"segment {segment:016x} was freed during the read")
        return data

    def data(self, segment: int) -> np.ndarray:
        """All bytes of a segment; they change when it is freed. Raises SegmentGone."""
        return self._mapping(segment).data

    def writable(self, segment: Segment) -> np.ndarray:
        """All bytes of a segment that was made for survivors, to be written."""
        disk = self.disk is not None and segment.segment in self._spilled
        directory = self.disk.directory if disk and self.disk is not None else self.directory
        return map_segment(str(directory), segment.segment, write=True).data

    def write(self, segment: int, offset: int, data: bytes | memoryview) -> None:
        """Write for a client that cannot map the segment; what a durable one gets is on the disk when this returns.
        Raises SegmentGone, Invalid."""
        disk = self.disk if segment in self._spilled else None
        if disk is not None and not is_durable(segment):
            raise SegmentGone(f"segment {segment:016x} was sealed; it is on disk")
        target = self._range(self._mapping(segment), offset, len(data))
        if disk is None:
            target[:] = np.frombuffer(data, np.uint8)
            return
        try:
            disk.write(segment, offset, np.frombuffer(data, np.uint8))
        except OSError as error:  # nobody knows what the disk has of it: the writer takes another one
            raise SegmentGone(f"segment {segment:016x} in {disk.directory}: {error.strerror}") from None

    def close(self, *, remove: bool = False) -> None:
        """Let the directory go; with `remove`, delete all that this class made in it."""
        self._mappings.clear()
        if remove:
            for name in os.listdir(self.directory):
                if name.endswith((".seg", ".pool")) or name in ("nonce", "incarnation"):
                    os.unlink(self.directory / name)
            if self.disk is not None:
                self.disk.remove()
        os.close(self._lock)
        if remove:
            os.unlink(self.directory / "lock")
            self.directory.rmdir()

    def _make_one(self, nbytes: int, touch: bool) -> Segment:
        if nbytes <= 0:
            raise Invalid(f"a segment of {nbytes} bytes")
        segment = segment_id(self.unit, self.incarnation, next(self._counter))
        path = self.directory / segment_file(segment)
        if self._pool[nbytes]:
            os.rename(self._pool[nbytes].pop(), path)
        else:
            self._shrink_pool(self.budget - nbytes)
            make_file(path, nbytes, touch=touch)
        self._sizes[segment] = nbytes
        self._poolable.add(segment)
        return Segment(segment, self.unit, nbytes)

    def _shrink_pool(self, room: int) -> None:
        """Unlink pooled files until what is here fits into `room`."""
        used = sum(self._sizes.values()) + self._pooled()
        for size in sorted(self._pool):
            while used > room and self._pool[size]:
                self._pool[size].pop().unlink()
                used -= size

    def _pooled(self) -> int:
        return sum(size * len(paths) for size, paths in self._pool.items())

    def _mapping(self, segment: int) -> Mapping:
        mapping = self._mappings.get(segment)
        if mapping is None:
            if segment in self._sizes:
                mapping = map_segment(str(self.directory), segment, write=True)
            elif self.disk is not None and segment in self._spilled:
                mapping = map_segment(str(self.disk.directory), segment)
            else:
                raise SegmentGone(f"unit {self.unit} has no segment {segment:016x}")
            self._mappings[segment] = mapping
        return mapping

    @staticmethod
    def _range(mapping: Mapping, offset: int, nbytes: int) -> np.ndarray:
        if offset < 0 or nbytes < 0 or offset + nbytes > len(mapping.data):
            raise Invalid(f"bytes {offset}..{offset + nbytes} are outside segment {mapping.segment:016x}")
        return mapping.data[offset : offset + nbytes]

    def _release(self, segment: int, nbytes: int) -> None:
        """Its memory is not needed any more: to the pool, if nobody can be writing to it or has pinned it."""
        if segment not in self._poolable or self._pooled() + nbytes > POOL_SHARE * self.budget:
            self._unlink(segment)
            return
        pooled = self.directory / f"{next(self._pool_counter):08d}.pool"
        if rename_unpinned(self.directory / segment_file(segment), pooled):
            self._forget(segment)
            self._pool[nbytes].append(pooled)
        else:
            self._unlink(segment)

    def _unlink_spilled(self, segment: int) -> None:
        assert self.disk is not None
        self._mappings.pop(segment, None)
        self.disk.unlink(segment)

    def _unlink(self, segment: int) -> None:
        self._forget(segment)
        with contextlib.suppress(IsADirectoryError):
            (self.directory / segment_file(segment)).unlink(missing_ok=True)

    def _forget(self, segment: int) -> None:
        self._sizes.pop(segment, None)
        self._poolable.discard(segment)
        self._mappings.pop(segment, None)

    def _scan(self) -> list[tuple[int, int]]:
        found = []
        for entry in os.scandir(self.directory):
            segment = segment_of(entry.name)
            if segment is not None and entry.is_file(follow_symlinks=False):
                found.append((segment, entry.stat(follow_symlinks=False).st_size))
        return found

    def _next_incarnation(self) -> int:
        directories = [self.directory, *([self.disk.directory] if self.disk is not None else [])]
        told = [_read_number(home / "incarnation") for home in directories]
        known = [number for number in told if number is not None]
        number = max(known) + 1 if known else first_incarnation()
        for home in directories:
            replace_file(home / "incarnation", _with_digest(number))
            sync_directory(home)
        return number

    def _read_or_make_nonce(self) -> str:
        path, boot = self.directory / "nonce", boot_id()
        nonce = text_if_there(path) or ""
        if not nonce.startswith(boot):
            nonce = f"{boot}:{secrets.token_hex(16)}"
            replace_file(path, nonce)
        return nonce


def first_incarnation() -> int:
    """In half of the range, so that a million restarts are left."""
    return secrets.randbelow(1 << 20)


def _read_number(path: Path) -> int | None:
    text = text_if_there(path)
    if text is None:
        return None
    number = text.partition(" ")[0]
    if not (number.isascii() and number.isdecimal() and len(number) <= 9 and text == _with_digest(int(number))):
        raise Invalid(
            f"{path} holds {text[:40]!r}, not a number with its digest; without it segment ids could come twice: "
            f"remove the directory {path.parent} (the rows in it are lost and are generated again)"
        )
    return int(number)


def _with_digest(number: int) -> str:
    """A number as it stands in its file, so that another number in its place is noticed."""
    return f"{number} {xxhash.xxh3_64_hexdigest(str(number).encode())}"


def replace_file(path: Path, text: str) -> None:
    """Write a small file, mode 0600, all or nothing, also if the machine dies."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(fd)
    os.replace(temporary, path)


def lock_file(path: Path, who: str, *, wait: float = 0.0) -> int:
    """Take the lock `path` for this process' life: the open file.

    Waits up to `wait` seconds for a holder that is about to end. Raises Invalid naming it, or if `path` is no file.
    """
    fd = open_regular(path, os.O_RDWR | os.O_CREAT)
    if not try_lock(fd):
        holder = os.pread(fd, 20, 0).decode(errors="replace").strip()
        gone = wait > 0 and holder.isdigit() and wait_for_exit(int(holder), wait)
        if not (gone and try_lock(fd)):
            os.close(fd)
            raise Invalid(f"{path} is held by process {holder or '?'}: end it before {who} is started here again")
    with contextlib.suppress(OSError):  # a full disk: others only do not hear who has it
        os.pwrite(fd, f"{os.getpid():<20}".encode(), 0)  # over the one before, for which there was room
    return fd


def try_lock(fd: int) -> bool:
    """Take the lock of an open file, if nobody has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(fd: int, seconds: float) -> bool:
    """Take the lock of an open file, waiting for its holder; whether it came in time. If not, close the file: a lock
    that comes later is let go at once."""
    if try_lock(fd):
        return True
    taken, same = threading.Event(), os.dup(fd)  # the lock is of both, until both are closed

    def wait() -> None:
        try:
            fcntl.flock(same, fcntl.LOCK_EX)
            taken.set()
        finally:
            os.close(same)

    threading.Thread(target=wait, name="lock", daemon=True).start()
    return taken.wait(seconds)
