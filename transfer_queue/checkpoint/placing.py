"""Where a checkpoint is, and how a new one takes the place of the old.

saving   .NAME.save.HEX is filled beside NAME, its manifest.json locked by who fills it
placed   the two are exchanged in one step; what was NAME is removed. Where the filesystem cannot exchange, NAME
         becomes .NAME.old.HEX first
killed   the next save removes what nobody holds the lock of, once its own checkpoint is in place; a load that finds
         no NAME takes the newest whole checkpoint of these
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import BinaryIO, TypeVar

from transfer_queue.errors import Invalid, QueueError
from transfer_queue.storage.private import kind_of_file, open_regular

T = TypeVar("T")

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"

_TRIES = 20
"""How often others may come between, each time with a checkpoint of their own."""

_AT_FDCWD, _EXCHANGE = -100, 2
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})
_libc = ctypes.CDLL(None, use_errno=True)


def named(directory: str | PathLike[str]) -> Path:
    """The directory that is meant: absolute, links followed. Raises Invalid for what names none."""
    try:
        path = os.fspath(directory)
        if not isinstance(path, str) or not path:
            raise TypeError
        return Path(os.path.realpath(path))
    except (TypeError, ValueError, OSError) as error:
        why = f" ({error})" if str(error) and not isinstance(error, TypeError) else ""
        raise Invalid(
            f"a checkpoint's directory is {directory!r:.200}, a {type(directory).__name__}{why}; "
            "give the name of a directory, as text or as a Path"
        ) from None


def prepare(directory: str | PathLike[str]) -> tuple[Path, Path, BinaryIO]:
    """Where the checkpoint is to be, where it is made, and its manifest, locked. Raises Invalid."""
    target = named(directory)
    try:
        _check_replaceable(target)
        return target, *_begin(target)
    except OSError as error:
        if isinstance(error, QueueError):
            raise
        what = f"cannot be made ({error.strerror})"
        with contextlib.suppress(OSError):
            if not target.is_dir():
                what = f"is {kind_of_file(target.lstat().st_mode)}"
        raise Invalid(f"a checkpoint's directory {target} {what}; name another directory") from None


def put_in_place(work: Path, target: Path) -> None:
    """What is in `work` is the checkpoint; what was, and what dead savers have left, is removed. Raises OSError, and
    Invalid for a directory that cannot be replaced."""
    try:
        _replace(work, target)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        raise Invalid(_mounted(target)) from None
    sync_directory(target.parent)
    shutil.rmtree(work, ignore_errors=True)
    for path in _beside(target):
        if _left(path):
            shutil.rmtree(path, ignore_errors=True)


def newest(directory: Path, read: Callable[[Path], T]) -> tuple[Path, T] | None:
    """The newest whole checkpoint that a killed saver left, with what `read` makes of it, if there is none in its
    place."""
    if os.path.lexists(directory):
        return None
    found: list[tuple[int, Path, T]] = []
    for path in _beside(directory):
        with contextlib.suppress(QueueError, OSError):
            found.append(((path / MANIFEST).stat().st_mtime_ns, path, read(path)))
    if not found:
        return None
    _, path, content = max(found, key=lambda one: one[:2])
    log.warning("%s is missing: a save was killed while it replaced it; taking %s", directory, path)
    return path, content


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- before ----------------------------------------------------------------------------------------------------------


def _check_replaceable(target: Path) -> None:
    """Raises Invalid, OSError."""
    if os.path.ismount(target):
        raise Invalid(_mounted(target))
    if not os.path.lexists(target):
        return
    if os.listdir(target) and not (target / MANIFEST).exists():
        raise Invalid(f"{target} holds something that is no checkpoint of a queue; name another directory")
    here = Path(os.path.realpath(os.getcwd()))
    if target == here or target in here.parents:
        raise Invalid(
            f"{target} is this process' working directory, which a checkpoint would replace as a whole; name a "
            f"directory in it, such as {target / 'checkpoint'}"
        )


def _mounted(target: Path) -> str:
    return (
        f"{target} is a mount point, which cannot be replaced as a whole; name a directory in it, such as "
        f"{target / 'checkpoint'}"
    )


def _begin(target: Path) -> tuple[Path, BinaryIO]:
    """A new directory, known to be in use. Again if somebody takes it for left over before it is locked."""
    for _ in range(_TRIES):
        work = target.with_name(f".{target.name}.save.{secrets.token_hex(4)}")
        work.mkdir(mode=0o700, parents=True)
        try:
            manifest = (work / MANIFEST).open("xb")
        except FileNotFoundError:
            continue
        if _lock(manifest.fileno()) is not False and (work / MANIFEST).exists():
            return work, manifest
        manifest.close()
    raise OSError(errno.EAGAIN, "others remove it", str(target))


def _lock(fd: int) -> bool | None:
    """Whether it was free; None where the filesystem has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


# --- after -----------------------------------------------------------------------------------------------------------


def _replace(work: Path, target: Path) -> None:
    for _ in range(_TRIES):
        aside = None
        if os.path.lexists(target):
            if _exchange(work, target):
                return
            aside = target.with_name(f".{target.name}.old.{secrets.token_hex(4)}")
            try:
                os.rename(target, aside)
            except FileNotFoundError:
                continue
        try:
            os.rename(work, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                if aside is not None:
                    os.rename(aside, target)
                raise
    raise OSError(errno.EAGAIN, "others put theirs there all the time", str(target))


def _exchange(one: Path, other: Path) -> bool:
    """Whether each is now where the other was; False if this filesystem cannot, or one is gone. Raises OSError."""
    try:
        renameat2 = _libc.renameat2
    except AttributeError:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE or number == errno.ENOENT:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _beside(target: Path) -> Iterator[Path]:
    """What savers of this checkpoint have made and did not remove (yet): directories of this user."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(save|old)\.[0-9a-f]{{8}}")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            ours = pattern.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
            if ours and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def _left(path: Path) -> bool:
    """Whether no saver is at work there."""
    try:
        fd = open_regular(path / MANIFEST, os.O_RDWR)
    except FileNotFoundError:
        return True
    except (OSError, QueueError):
        return False
    try:
        return _lock(fd) is True
    finally:
        os.close(fd)
