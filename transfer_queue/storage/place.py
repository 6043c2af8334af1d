"""Which directory the segments go to, and whether there is room for them: found out before anything starts."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from transfer_queue.errors import Invalid
from transfer_queue.storage.filesystems import IN_MEMORY, is_shared, kind_of

log = logging.getLogger(__name__)

SHM = Path("/dev/shm")

DEFAULT_BUDGET = 4 << 30
"""Bytes a unit may hold if nothing is said and at least four times as much is free."""

NO_LIMIT = 1 << 60
"""Bytes from which on a limit of cgroup version 1 means none."""

SPILL_SHARE = 4
"""Times its budget in memory that a unit may move to disk if nothing is said and four times as much is free there."""

_CGROUP_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def choose_storage(storage_dir: str | Path | None, units: int, unit_budget: int | None) -> tuple[Path, int]:
    """Parent directory for storage and the budget of each unit.

    Without `storage_dir`: /dev/shm if it has the room beside Ray's object store, else the temporary directory. Raises
    Invalid, saying what to change, if the directory is missing, not writable, shared with other machines, or too full
    for the budget asked.
    """
    need = units * (unit_budget or 64 << 20)
    parent = Path(storage_dir).absolute() if storage_dir is not None else _default_parent(need)
    if not _usable(parent):
        raise Invalid(f"storage directory {parent} does not exist or is not writable; make it, or set storage_dir")
    if is_shared(parent):
        raise Invalid(
            f"storage directory {parent} is on {kind_of(parent)}, which other machines may share: segments are mapped, "
            "and a mapping does not show what another machine writes; set storage_dir to a local disk or /dev/shm"
        )
    free = free_bytes(parent)
    budget = unit_budget or min(DEFAULT_BUDGET, beside_ray(parent) // (4 * units))
    if free < need or budget <= 0:
        raise Invalid(
            f"{parent} has {free >> 20} MiB free ({_what_counts(parent)}), {units} storage units need {need >> 20} "
            f"MiB; lower unit_budget_bytes, enlarge it ({_how_to_enlarge(parent)}), or set storage_dir to another disk"
        )
    return parent, budget


def choose_spill(
    beside: Path, spill_dir: str | Path | None, units: int, unit_budget: int, spill_budget: int | None
) -> int:
    """Bytes that each unit may move to disk when its memory is full: in `spill_dir`, else in `beside`; 0: none.

    Without `spill_dir` and `spill_budget` nothing is moved to a directory in memory or one that machines share. Raises
    Invalid, saying what to change, for a directory that cannot serve or has not the room asked for.
    """
    if spill_budget == 0:
        return 0
    place = Path(spill_dir).absolute() if spill_dir is not None else _nearest(beside)
    if not _usable(place):
        raise Invalid(f"spill directory {place} does not exist or is not writable; make it, or set spill_dir")
    asked = spill_dir is not None or spill_budget is not None
    if is_shared(place) or (kind_of(place) in IN_MEMORY and spill_dir is None):
        if not asked:
            return 0
        raise Invalid(
            f"spill directory {place} is on {kind_of(place)}; what is moved there when memory is full must be mapped "
            "from a local disk: set spill_dir to one, or spill_budget_bytes to 0"
        )
    free = free_bytes(place)
    if spill_budget is not None and units * spill_budget > free:
        raise Invalid(
            f"{place} has {free >> 20} MiB free, {units} storage units may move {units * spill_budget >> 20} MiB "
            "there; lower spill_budget_bytes, or set spill_dir to another disk"
        )
    return spill_budget or min(SPILL_SHARE * unit_budget, free // (4 * units))


def _nearest(directory: Path) -> Path:
    """It, or the nearest of its parents that is there."""
    return next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())


def free_bytes(directory: Path) -> int:
    """Bytes that may still be written: free space, and in memory not more than the cgroup's limit leaves."""
    info = os.statvfs(directory)
    free = info.f_bavail * info.f_frsize
    if kind_of(directory) not in IN_MEMORY:
        return free
    limit = memory_limit()
    if limit is not None:
        free = min(free, max(0, limit[0] - limit[1]))
    return free


def beside_ray(directory: Path) -> int:
    """`free_bytes` without what Ray's object stores on this machine may still take of it."""
    return max(0, free_bytes(directory) - (ray_store_bytes() if directory == SHM else 0))


def memory_limit() -> tuple[int, int] | None:
    """(limit, used) bytes of this process' cgroup: files in memory count there. None without a limit."""
    for limit_file, used_file in _CGROUP_LIMITS:
        try:
            limit, used = int(limit_file.read_text()), int(used_file.read_text())
        except (OSError, ValueError):  # not this cgroup version, or "max"
            continue
        return (limit, used) if limit < NO_LIMIT else None
    return None


def ray_store_bytes(processes: Iterable[Path] | None = None) -> int:
    """Bytes of /dev/shm that the object stores of Ray's nodes on this machine may take: it fills as it is used, so the
    free space does not show it."""
    found = 0
    for process in Path("/proc").glob("[0-9]*") if processes is None else processes:
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is not ours to read
            continue
        if not arguments[0].endswith(b"/raylet"):
            continue
        options = dict(a.removeprefix(b"--").split(b"=", 1) for a in arguments if b"=" in a)
        if options.get(b"plasma_directory", b"/dev/shm") == b"/dev/shm":
            size = options.get(b"object_store_memory", b"")
            found += int(size) if size.isdigit() else 0
    return found


def _default_parent(need: int) -> Path:
    temporary = Path(tempfile.gettempdir())
    if not _usable(SHM):
        return temporary
    if (free := beside_ray(SHM)) >= need:
        return SHM
    log.warning(
        "%s has %d MiB to spare (%s) and %d MiB are needed: segments go to %s. Enlarge it "
        "(%s), or set storage_dir",
        SHM, free >> 20, _what_counts(SHM), need >> 20, temporary, _how_to_enlarge(SHM),
    )  # fmt: skip
    return temporary


def _what_counts(directory: Path) -> str:
    if kind_of(directory) not in IN_MEMORY:
        return "disk"
    parts = ["tmpfs"]
    if (limit := memory_limit()) is not None:
        parts.append(f"memory limit of the cgroup {limit[0] >> 20} MiB, {limit[1] >> 20} used")
    if directory == SHM and (ray := ray_store_bytes()):
        parts.append(f"Ray's object store may take {ray >> 20} MiB of it")
    return ", ".join(parts)


def _how_to_enlarge(directory: Path) -> str:
    if kind_of(directory) not in IN_MEMORY:
        return "remove other files"
    return "docker run --shm-size=..., an emptyDir of medium Memory in a pod, or mount -o remount,size=..."


def _usable(directory: Path) -> bool:
    return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)
