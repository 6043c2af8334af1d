"""Segment files: their names and ids, how they are made, and how a process maps them.

A segment is a file of fixed size in its unit's directory (mode 0700). Its name says its id, and the id is never used
again: unit | incarnation of the unit | counter. A pooled file gets a new name, by rename, before it is granted again,
so "the file of this id is still the one that I have mapped" is one `stat`, and tells a reader that the bytes it has
just copied were not reused meanwhile.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transfer_queue.errors import Invalid, SegmentGone

UNIT_SHIFT, INCARNATION_SHIFT = 53, 32
"""An id is a positive int64: 10 bits of unit, 21 of incarnation, 32 of counter."""

MAX_UNITS = 1 << (63 - UNIT_SHIFT)

_FILE = re.compile(r"[0-9a-f]{16}\.seg")

MIN_SEGMENT, MAX_SEGMENT = 64 << 10, 1 << 40
"""Bytes of a usual segment."""


def check_segment_bytes(nbytes: int) -> None:
    """Raises Invalid for a segment size with which a queue would hold files without number, or none."""
    if not MIN_SEGMENT <= nbytes <= MAX_SEGMENT:
        raise Invalid(f"segment_bytes={nbytes}; expected {MIN_SEGMENT} (64 KiB) to {MAX_SEGMENT}")


def segment_id(unit: int, incarnation: int, counter: int) -> int:
    """The id of the `counter`-th segment that `unit` made in its `incarnation`."""
    if not (0 <= unit < MAX_UNITS and 0 <= incarnation < 1 << 21 and 0 <= counter < 1 << 32):
        raise Invalid(f"no segment id for unit {unit}, incarnation {incarnation}, counter {counter}")
    return unit << UNIT_SHIFT | incarnation << INCARNATION_SHIFT | counter


def unit_of(segment: int) -> int:
    """The unit that made a segment."""
    return segment >> UNIT_SHIFT


def segment_file(segment: int) -> str:
    """The file name of a segment. Raises Invalid for an id that is none, so no path is ever made of foreign text."""
    if not 0 <= segment < 1 << 63:
        raise Invalid(f"{segment} is not a segment id")
    return f"{segment:016x}.seg"


def segment_of(file_name: str) -> int | None:
    """The id that a file name stands for, or None if it is not a segment's."""
    return int(file_name[:16], 16) if _FILE.fullmatch(file_name) else None


@dataclass(slots=True, eq=False)
class Mapping:
    """A mapped segment. The memory stays valid as long as an array made of it lives, also after unlink."""

    segment: int
    path: str
    inode: int
    data: np.ndarray
    """uint8[nbytes]; read-only unless opened for writing."""

    def stands(self) -> bool:
        """Whether the file of this id is still the one mapped: it was neither unlinked nor given a new id."""
        try:
            return os.stat(self.path, follow_symlinks=False).st_ino == self.inode
        except FileNotFoundError:
            return False


def make_file(path: Path, nbytes: int) -> None:
    """Make `path`, mode 0600, with every page of `nbytes` allocated (a hole on a full tmpfs would be a SIGBUS later).

    Raises OSError (ENOSPC: the file is removed again).
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ).close()
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def map_segment(directory: str, segment: int, *, write: bool = False) -> Mapping:
    """Map a segment of a unit's directory. Raises SegmentGone when its file is no longer there."""
    path = os.path.join(directory, segment_file(segment))
    try:
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SegmentGone(f"segment {segment:016x} is no longer in {directory}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size == 0:
            raise SegmentGone(f"{path} is not a segment file")
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if write else 0)
        memory = mmap.mmap(fd, info.st_size, flags=flags, prot=prot)
    finally:
        os.close(fd)
    return Mapping(segment, path, info.st_ino, np.frombuffer(memory, dtype=np.uint8))
