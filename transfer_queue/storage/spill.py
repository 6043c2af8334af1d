"""Segments on disk: where a storage unit puts the oldest when its memory is full.

A spilled segment keeps its id and its content; who maps it maps the file here. It is whole from the moment it has its
name. What was spilled on another boot, or beside another directory, is of nobody: ids begin anew there.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from transfer_queue.failpoints import failpoint
from transfer_queue.storage.segments import make_file, segment_file, segment_of

CHUNK = 8 << 20
"""Bytes per system call, so that a process that is to end can."""


class SpillDirectory:
    """Invariant: `sizes` are the segments that are here in full, by id."""

    def __init__(self, directory: str | Path, owner: str) -> None:
        """`owner`: the nonce of the unit's directory in memory. Raises OSError."""
        self.directory = Path(directory)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark = self.directory / "owner"
        ours = mark.exists() and mark.read_text(errors="replace") == owner
        self.sizes: dict[int, int] = {}
        for entry in list(os.scandir(self.directory)):
            segment = segment_of(entry.name)
            if segment is not None and ours and entry.is_file(follow_symlinks=False):
                self.sizes[segment] = entry.stat(follow_symlinks=False).st_size
            elif segment is not None or entry.name.endswith(".part"):
                os.unlink(entry.path)
        if not ours:
            mark.write_text(owner)

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
        """An empty one. Raises OSError."""
        make_file(self.directory / segment_file(segment), nbytes, touch=False)
        self.sizes[segment] = nbytes

    def unlink(self, segment: int) -> None:
        if self.sizes.pop(segment, None) is not None:
            (self.directory / segment_file(segment)).unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete all that this class made."""
        for segment in list(self.sizes):
            self.unlink(segment)
        (self.directory / "owner").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()


def spill_arguments(home: Path | None, unit: int, budget: int) -> list[str]:
    """Those of a unit's process; `home` is the directory of all units, None if nothing goes to disk."""
    return [] if home is None else ["--spill", str(home / f"unit-{unit}"), "--spill-budget", str(budget)]


def _copy(source: Path, target: Path, end: int, nbytes: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    read = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        write = os.open(target, flags, 0o600)
        try:
            at = 0
            while at < end:
                at += os.sendfile(write, read, at, min(CHUNK, end - at))
            os.ftruncate(write, nbytes)
        finally:
            os.close(write)
    finally:
        os.close(read)
