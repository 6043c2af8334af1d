"""Which directory the segments go to, and whether there is room for them: found out before anything starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from transfer_queue.errors import Invalid

SHM = Path("/dev/shm")

DEFAULT_BUDGET = 4 << 30
"""Bytes a unit may hold if nothing is said and at least four times as much is free."""

_CGROUP_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def choose_storage(storage_dir: str | Path | None, units: int, unit_budget: int | None) -> tuple[Path, int]:
    """Parent directory for storage and the budget of each unit.

    Without `storage_dir`: /dev/shm if it has the room, else the temporary directory. Raises Invalid, saying what to
    change, if the directory is missing, not writable, or too full for the budget asked.
    """
    need = units * (unit_budget or 64 << 20)
    if storage_dir is not None:
        parent = Path(storage_dir).absolute()
    else:
        parent = SHM if _usable(SHM) and free_bytes(SHM) >= need else Path(tempfile.gettempdir())
    if not _usable(parent):
        raise Invalid(f"storage directory {parent} does not exist or is not writable; make it, or set storage_dir")
    free = free_bytes(parent)
    budget = unit_budget or min(DEFAULT_BUDGET, free // (4 * units))
    if free < need:
        raise Invalid(
            f"{parent} has {free >> 20} MiB free (memory limits included), {units} storage units need "
            f"{need >> 20} MiB; lower unit_budget_bytes, enlarge it (mount -o remount,size=...), or set storage_dir"
        )
    return parent, budget


def free_bytes(directory: Path) -> int:
    """Bytes that may still be written: free space, and for a tmpfs not more than the memory limit leaves."""
    info = os.statvfs(directory)
    free = info.f_bavail * info.f_frsize
    if not _is_tmpfs(directory):
        return free
    for limit_file, used_file in _CGROUP_LIMITS:
        try:
            limit, used = int(limit_file.read_text()), int(used_file.read_text())
        except (OSError, ValueError):  # not this cgroup version, or "max"
            continue
        free = min(free, max(0, limit - used))
    return free


def _usable(directory: Path) -> bool:
    return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)


def _is_tmpfs(directory: Path) -> bool:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    above = [m for m in mounts if directory == Path(m[1]) or Path(m[1]) in directory.parents]
    return bool(above) and max(above, key=lambda m: len(m[1]))[2] == "tmpfs"
