"""Directories and files that nobody but this user can have put where they are.

Whoever runs as the same user is trusted. Others are not: in a directory like /dev/shm they may make a name before we
do, put a link or a pipe there, and what we follow or wait for is then theirs.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from transfer_queue.errors import Invalid, QueueError

_KINDS = (
    (stat.S_ISLNK, "a symbolic link"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISDIR, "a directory"),
    (stat.S_ISSOCK, "a socket"), (stat.S_ISREG, "a file"),
)  # fmt: skip


def private_directory(path: str | Path) -> None:
    """Make it, with its parents, mode 0700, or see that the one that is there is ours.

    Raises Invalid if it cannot be made, if it belongs to another user, if others may write to it, or if it is no
    directory but, say, a link to one.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except FileExistsError:
        check_private(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise Invalid(
            f"directory {str(path)[:100]!r} cannot be made ({why}); name another one that you may write to"
        ) from None


def check_private(path: Path) -> None:
    """Raises Invalid unless it is a directory of ours to which nobody else may write, FileNotFoundError."""
    info = path.stat(follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode):
        raise Invalid(f"{path} is {kind_of_file(info.st_mode)}, not a directory: remove it, or name another directory")
    _check_owner(path, info, 0o022, "write to it", "remove it, or name another directory", "chmod go-w")


def open_regular(
    path: str | Path, flags: int = os.O_RDONLY, *, mode: int = 0o600, error: type[QueueError] = Invalid
) -> int:
    """The descriptor of a file (`flags`, `mode` as for os.open); at once, whatever stands there.

    Raises `error` for anything that is no regular file (a link is not followed, a pipe not waited for), else OSError.
    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as reason:
        if reason.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise error(_no_file(path, os.lstat(path).st_mode)) from None
    found = os.fstat(fd).st_mode
    if not stat.S_ISREG(found):
        os.close(fd)
        raise error(_no_file(path, found))
    return fd


def read_regular(path: str | Path, *, error: type[QueueError] = Invalid, secret: bool = False) -> bytes:
    """All of a file. Raises as open_regular; a `secret` that others may read, or that is another's, is Invalid."""
    with os.fdopen(open_regular(path, error=error), "rb") as file:
        if secret:
            remedy = "remove it and give the directory a key of yours"
            _check_owner(path, os.fstat(file.fileno()), 0o077, "read it", remedy, "chmod go=")
        return file.read()


def text_if_there(path: str | Path) -> str | None:
    """A small file's text, damaged bytes replaced; None if there is none. Raises as open_regular."""
    try:
        return read_regular(path).decode(errors="replace")
    except FileNotFoundError:
        return None


def check_owned(path: str | Path, info: os.stat_result) -> None:
    """Raises Invalid for an open file that another user owns, or that has another name as well."""
    if info.st_uid != os.getuid() or info.st_nlink > 1:
        what = f"belongs to user {info.st_uid}, not to {os.getuid()}" if info.st_nlink < 2 else "has a second name"
        raise Invalid(f"{path} {what} (mode {stat.S_IMODE(info.st_mode):04o}): others may change it; remove it")


def kind_of_file(mode: int) -> str:
    return next((name for test, name in _KINDS if test(mode)), "a device")


def _no_file(path: str | Path, mode: int) -> str:
    return f"{path} is {kind_of_file(mode)}, not a regular file: remove it, or put the file back"


def _check_owner(path: str | Path, info: os.stat_result, bits: int, what: str, remove: str, chmod: str) -> None:
    mode = f"{stat.S_IMODE(info.st_mode):04o}"
    if info.st_uid != os.getuid():
        raise Invalid(f"{path} belongs to user {info.st_uid} (mode {mode}), not to {os.getuid()}: {remove}")
    if info.st_mode & bits:
        raise Invalid(f"{path} has mode {mode}: others may {what}; see that it is as you left it, then {chmod} {path}")
