"""Files that are whole at every moment: replaced as a whole, or appended to by whole lines."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to a temporary neighbour, sync it, and rename it over `path`."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def append_line(fd: int, line: bytes, path: Path) -> None:
    """One line by one write(). Raises OSError, with no half line left for the next one to join."""
    written = os.write(fd, line)
    if written < len(line):
        os.ftruncate(fd, os.fstat(fd).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def cut_torn_line(path: Path) -> None:
    """Take off what a process that died left of a line; nothing if there is no file."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
