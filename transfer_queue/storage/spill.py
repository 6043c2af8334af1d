"""Segments on disk: where a storage unit puts the oldest when its memory is full, and makes those that are durable.

A spilled segment keeps its id and its content; who maps it maps the file here. It is whole from the moment it has its
name. What was spilled on another boot, or beside another directory, is of nobody: it may not be whole, and what belongs
to it is gone. A durable segment is its own; its name is on the disk before anybody hears of it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

from transfer_queue.failpoints import failpoint
from transfer_queue.storage.journal import sync_directory
from transfer_queue.storage.private import open_regular, private_directory, text_if_there
from transfer_queue.storage.segments import OpenFile, is_durable, make_file, map_segment, segment_file, segment_of

CHUNK = 8 << 20
"""Bytes per system call, so that a process that is to end can."""


class SpillDirectory:
    """Invariant: `sizes` are the segments that are here in full, by id."""

    def __init__(self, directory: str | Path, owner: str) -> None:
        """`owner`: the nonce of the unit's directory in memory. Raises OSError, Invalid."""
        self.directory = Path(directory)
        private_directory(self.directory)
        sync_directory(self.directory.parent)
        mark = self.directory / "owner"
        ours = text_if_there(mark) == owner
        self.sizes: dict[int, int] = {}
        for entry in list(os.scandir(self.directory)):
            segment = segment_of(entry.name)
            if segment is not None and (ours or is_durable(segment)) and entry.is_file(follow_symlinks=False):
                self.sizes[segment] = entry.stat(follow_symlinks=False).st_size
            elif segment is not None or entry.name.endswith(".part"):
                os.unlink(entry.path)
        if not ours:
            _write(mark, owner)

    def store(self, source: Path, segment: int, end: int, nbytes: int) -> None:
        """Copy a segment's file of `nbytes`, of which the first `end` were written. Raises OSError, and then leaves
        nothing."""
        part = self.directory / f"{segment:016x}.part"
        try:
            _copy(source, part, end, nbytes)
            failpoint("unit.mid_spill")
            os.rename(part, self.directory / segment_file(segment))
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self.sizes[segment] = nbytes

    def make(self, segment: int, nbytes: int) -> None:
        """An empty one; a durable one is on the disk. Raises OSError."""
        path = self.directory / segment_file(segment)
        make_file(path, nbytes, touch=False)
        if is_durable(segment):
            self._sync(path)
        self.sizes[segment] = nbytes

    def write(self, segment: int, offset: int, data: np.ndarray) -> None:
        """Bytes (uint8) are on the disk when this returns. Raises OSError, SegmentGone."""
        file = self._open(segment)
        file.write_at(offset, data)
        file.sync()

    def sync(self, segment: int) -> None:
        """What anybody wrote to a segment is on the disk when this returns. Raises OSError, SegmentGone."""
        self._open(segment).sync()

    def unlink(self, segment: int) -> None:
        if self.sizes.pop(segment, None) is not None:
            (self.directory / segment_file(segment)).unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete all that this class made."""
        for segment in list(self.sizes):
            self.unlink(segment)
        for name in ("owner", "incarnation"):
            (self.directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def _open(self, segment: int) -> OpenFile:
        return map_segment(str(self.directory), segment, write=True).file

    def _sync(self, path: Path) -> None:
        """A new file, with its size and its name, is on the disk; else there is none. Raises OSError."""
        try:
            fd = open_regular(path)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            sync_directory(self.directory)
        except OSError:
            path.unlink(missing_ok=True)
            raise


def spill_arguments(home: Path | None, unit: int, budget: int) -> list[str]:
    """Those of a unit's process; `home` is the directory of all units, None if nothing goes to disk."""
    return [] if home is None else ["--spill", str(home / f"unit-{unit}"), "--spill-budget", str(budget)]


def _write(path: Path, text: str) -> None:
    with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write(text)


def _copy(source: Path, target: Path, end: int, nbytes: int) -> None:
    read = open_regular(source)
    try:
        write = open_regular(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            at = 0
            while at < end:
                at += os.sendfile(write, read, at, min(CHUNK, end - at))
            os.ftruncate(write, nbytes)
        finally:
            os.close(write)
    finally:
        os.close(read)
