"""Segment files: their names and ids, how they are made, and how a process maps them.

A segment is a file of fixed size in its unit's directory (mode 0700). Its name says its id, and the id is never used
again: unit | incarnation of the unit | durable | counter. A durable one was made on disk, for bytes that are to outlive
the machine. A pooled file gets a new name, by rename, before it is granted again, so "the file of this id is still the
one that I have mapped" is one `stat`, and tells a reader that the bytes it has just copied were not reused meanwhile.

Since a rename keeps the file, a process keeps what it has open and mapped (FileCache): the same file under a new id is
not mapped again, which would cost as much as copying its bytes.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transfer_queue.errors import Invalid, QueueError, SegmentGone
from transfer_queue.storage.memory import map_file
from transfer_queue.storage.private import check_owned, open_regular

UNIT_SHIFT, INCARNATION_SHIFT = 53, 32
"""An id is a positive int64: 10 bits of unit, 21 of incarnation, 1 for a durable one, 31 of counter."""

DURABLE = 1 << 31

MAX_UNITS = 1 << (63 - UNIT_SHIFT)

_FILE = re.compile(r"[0-9a-f]{16}\.seg")

MIN_SEGMENT, MAX_SEGMENT = 64 << 10, 1 << 40
"""Bytes of a usual segment."""

MAX_FILES = 256
"""Files that a process keeps open and mapped per direction; a process may usually have 1,024 descriptors."""


def check_segment_bytes(nbytes: int) -> None:
    """Raises Invalid for a segment size with which a queue would hold files without number, or none."""
    if not MIN_SEGMENT <= nbytes <= MAX_SEGMENT:
        raise Invalid(f"segment_bytes={nbytes}; expected {MIN_SEGMENT} (64 KiB) to {MAX_SEGMENT}")


def segment_id(unit: int, incarnation: int, counter: int, *, durable: bool = False) -> int:
    """The id of the `counter`-th segment that `unit` made in its `incarnation`."""
    if not (0 <= unit < MAX_UNITS and 0 <= incarnation < 1 << 21 and 0 <= counter < DURABLE):
        raise Invalid(f"no segment id for unit {unit}, incarnation {incarnation}, counter {counter}")
    return unit << UNIT_SHIFT | incarnation << INCARNATION_SHIFT | durable * DURABLE | counter


def is_durable(segment: int) -> bool:
    """Whether a segment was made on disk, to outlive the machine."""
    return bool(segment & DURABLE)


def unit_of(segment: int) -> int:
    """The unit that made a segment."""
    return segment >> UNIT_SHIFT


def incarnation_of(segment: int) -> int:
    """The incarnation in which the unit made it."""
    return segment >> INCARNATION_SHIFT & (1 << UNIT_SHIFT - INCARNATION_SHIFT) - 1


def segment_file(segment: int) -> str:
    """The file name of a segment. Raises Invalid for an id that is none, so no path is ever made of foreign text."""
    if not 0 <= segment < 1 << 63:
        raise Invalid(f"{segment} is not a segment id")
    return f"{segment:016x}.seg"


def segment_of(file_name: str) -> int | None:
    """The id that a file name stands for, or None if it is not a segment's."""
    return int(file_name[:16], 16) if _FILE.fullmatch(file_name) else None


class OpenFile:
    """A segment file as this process has it open, under whatever id. Closed and unmapped when nobody holds it.

    While it is open its inode is not given to another file, also after unlink: (device, inode) names it.
    """

    __slots__ = ("__weakref__", "_data", "_fd", "_write", "device", "inode", "nbytes")

    def __init__(self, fd: int, info: os.stat_result, *, write: bool) -> None:
        self._fd, self._write = fd, write
        self.device, self.inode, self.nbytes = info.st_dev, info.st_ino, info.st_size
        self._data: np.ndarray | None = None

    @property
    def data(self) -> np.ndarray:
        """uint8[nbytes], mapped when first asked for; read-only unless opened for writing."""
        if self._data is None:
            self._data = map_file(self._fd, self.nbytes, write=self._write, populate=self._write)
        return self._data

    def private_view(self) -> np.ndarray:
        """uint8[nbytes] that keeps this file open; what is written to it stays in it."""
        return map_file(self._fd, self.nbytes, private=True, keep=self)

    def write_at(self, offset: int, data: np.ndarray) -> None:
        """Write without mapping: half the cost of a first mapping, twice that of one that is there. Raises OSError."""
        view = data.data
        while len(view):
            done = os.pwrite(self._fd, view, offset)
            view, offset = view[done:], offset + done

    def sync(self) -> None:
        """What was written is on the disk when this returns. Raises OSError."""
        os.fdatasync(self._fd)

    def unlinked(self) -> bool:
        """Whether it has no name any more: nobody will use it again."""
        return os.fstat(self._fd).st_nlink == 0

    def __del__(self) -> None:
        os.close(self._fd)


@dataclass(slots=True, eq=False)
class Mapping:
    """A segment's file under its id. The memory stays valid as long as an array made of it lives, also after unlink."""

    segment: int
    path: str
    file: OpenFile

    @property
    def data(self) -> np.ndarray:
        """uint8[nbytes]; read-only unless opened for writing."""
        return self.file.data

    @property
    def inode(self) -> int:
        return self.file.inode

    def stands(self) -> bool:
        """Whether the file of this id is still the one mapped: it was neither unlinked nor given a new id."""
        try:
            info = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return info.st_ino == self.file.inode and info.st_dev == self.file.device


class FileCache:
    """The files of segments that this process has open, kept over their reuse. Invariant: one OpenFile per file."""

    def __init__(self, *, write: bool) -> None:
        self._write = write
        self._files: OrderedDict[tuple[int, int], OpenFile] = OrderedDict()

    def open(self, directory: str, segment: int, spill: str = "") -> tuple[Mapping, bool]:
        """The segment, and whether its file was open here before. Raises SegmentGone when it is no longer there."""
        path, fd, info = _open_segment(directory, segment, write=self._write, spill=spill)
        key = info.st_dev, info.st_ino
        known = self._files.get(key)
        if known is not None and known.nbytes == info.st_size:
            os.close(fd)
            self._files.move_to_end(key)
            return Mapping(segment, path, known), True
        file = self._files[key] = OpenFile(fd, info, write=self._write)
        if len(self._files) > MAX_FILES:
            self._files.popitem(last=False)
        return Mapping(segment, path, file), False

    def sweep(self) -> None:
        """Let go of files that nobody will use again, so that their memory goes too."""
        for key in [key for key, file in self._files.items() if file.unlinked()]:
            del self._files[key]

    def clear(self) -> None:
        self._files.clear()


def make_file(path: Path, nbytes: int, *, touch: bool = True) -> None:
    """Make `path`, mode 0600, with every page of `nbytes` allocated (a hole on a full tmpfs would be a SIGBUS later).

    `touch` also clears the pages, which their first mapping would do else; a writer of whole pages needs it not.
    Raises OSError (ENOSPC: the file is removed again).
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        if touch:
            map_file(fd, nbytes, populate=True)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def map_segment(directory: str, segment: int, *, write: bool = False) -> Mapping:
    """Map a segment of a unit's directory. Raises SegmentGone when its file is no longer there."""
    path, fd, info = _open_segment(directory, segment, write=write)
    return Mapping(segment, path, OpenFile(fd, info, write=write))


def pin_segment(directory: str, segment: int, spill: str = "") -> OpenFile:
    """A segment whose file is not reused as long as the result lives, by a shared lock that also a killed process lets
    go. Raises SegmentGone."""
    path, fd, info = _open_segment(directory, segment, write=False, spill=spill)
    file = OpenFile(fd, info, write=False)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SegmentGone(f"segment {segment:016x} is being freed") from None
    if not Mapping(segment, path, file).stands():
        raise SegmentGone(f"segment {segment:016x} was freed before it was pinned")
    return file


def rename_unpinned(path: Path, new: Path) -> bool:
    """Give a segment's file another name, so that it can be reused, unless somebody has pinned it or it is no file."""
    try:
        fd = open_regular(path, os.O_RDWR)
    except Invalid:  # not what was made here
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(path, new)  # under the lock: who pins it after this sees that its name is gone
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _open_segment(
    directory: str, segment: int, *, write: bool, spill: str = ""
) -> tuple[str, int, os.stat_result]:  # fmt: skip
    """Its file in `directory`, or else in `spill`: it gets its name there before it loses the one here.

    Raises SegmentGone, and Invalid for what no unit of ours has made.
    """
    path = os.path.join(directory, segment_file(segment))
    try:
        fd = open_regular(path, os.O_RDWR if write else os.O_RDONLY)
    except FileNotFoundError:
        if spill:
            return _open_segment(spill, segment, write=write)
        raise SegmentGone(f"segment {segment:016x} is no longer in {directory}") from None
    info = os.fstat(fd)
    try:
        check_owned(path, info)
        if info.st_size == 0:
            raise SegmentGone(f"{path} is not a segment file")
    except QueueError:
        os.close(fd)
        raise
    return path, fd, info
