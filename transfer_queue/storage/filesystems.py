"""What kind of filesystem a directory is on, and what that means for bytes that are mapped, locked and renamed.

Known by the magic number of statfs(2), which /proc/mounts and a container's view of it cannot hide.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NAMES = {
    0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x6969: "nfs", 0xFF534D42: "cifs", 0xFE534D42: "smb",
    0x00C36400: "ceph", 0x0BD00BD0: "lustre", 0x65735546: "fuse", 0x47504653: "gpfs", 0x19830326: "beegfs",
    0x794C7630: "overlay", 0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs", 0x2FC12FC1: "zfs",
}  # fmt: skip

SHARED = frozenset({"nfs", "cifs", "smb", "ceph", "lustre", "fuse", "gpfs", "beegfs"})
"""Other machines may have the same directory: a mapping there does not show their writes. fuse may be anything."""

IN_MEMORY = frozenset({"tmpfs", "ramfs"})


class _Statfs(ctypes.Structure):
    _fields_ = (("f_type", ctypes.c_long), ("rest", ctypes.c_byte * 248))


def magic_of(directory: Path) -> int:
    """`f_type` of statfs. Raises OSError."""
    libc, found = ctypes.CDLL(None, use_errno=True), _Statfs()
    if libc.statfs(os.fsencode(directory), ctypes.byref(found)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(directory))
    return found.f_type & 0xFFFFFFFF


def kind_of(directory: Path) -> str:
    """ "tmpfs", "nfs", "ext4", ..., or the magic number in hex. Raises OSError."""
    magic = magic_of(directory)
    return _NAMES.get(magic, f"{magic:#x}")


def is_shared(directory: Path) -> bool:
    """Whether other machines may see the same directory. Raises OSError."""
    return kind_of(directory) in SHARED


def journal_on_shared(directory: Path, mounts: str | None = None) -> tuple[str, str] | None:
    """(what it means, what to do) for a journal in `directory`, or None if it is on a disk of this machine."""
    kind = kind_of(directory)
    if kind not in SHARED:
        return None
    what = (
        f"the journal is on {kind}: a rename is atomic on the server, but another machine may see the old file for as "
        "long as it caches attributes (acregmax, 60 s); fdatasync returns when the server says that the bytes are on "
        "its disk, which an export with `async` says too early, and costs a round trip; the lock that keeps a second "
        "queue out of this directory holds between machines only if the server knows of it"
    )
    options = _mount_options(directory, Path("/proc/mounts").read_text() if mounts is None else mounts)
    if kind == "nfs" and {"nolock", "local_lock=all", "local_lock=flock"} & options:
        return what, (
            f"locks are local to each machine here ({', '.join(sorted(options & _LOCAL_LOCKS))}): remount without it, "
            "or see that only one machine starts a queue on this directory"
        )
    return what, "put the queue's directory on a local disk and let checkpoints go to the shared one, if you can"


_LOCAL_LOCKS = {"nolock", "local_lock=all", "local_lock=flock"}


def _mount_options(directory: Path, mounts: str) -> set[str]:
    found, longest = "", -1
    for line in mounts.splitlines():
        point, options = line.split()[1], line.split()[3]
        inside = directory == Path(point) or Path(point) in directory.parents
        if inside and len(point) > longest:
            found, longest = options, len(point)
    return set(found.split(","))
