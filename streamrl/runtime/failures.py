"""What ended a run, in words that say what to do: the failures that the user can mend."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from agent_loop.user_code import place_of
from streamrl.errors import UserError
from streamrl.runtime.run_dir import LOGS
from transfer_queue.errors import QueueFull

MIB = 1 << 20

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(UserError):
    """A run directory could not be written any more."""


def explained(error: Exception, directory: Path) -> Exception:
    """The error that ended the run in `directory`; where a full disk did, one that says what to do."""
    if isinstance(error, UserError) or not (found := [text for each in _chain(error) if (text := _full(each))]):
        return error
    if isinstance(error, QueueFull):  # of the queue's storage, which may be elsewhere
        return DiskFullError(str(error))
    try:
        usage = shutil.disk_usage(directory)
        room = f"{usage.free / MIB:.1f} of {usage.total / MIB:.1f} MiB are free"
    except OSError:
        room = "how much is free there cannot be told"
    return DiskFullError(
        f"no room to write in {directory}: {found[0]}; {room}. Free disk space there (older runs are beside it) or "
        "raise the quota, then the same command goes on from what was written before"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it says it came from, another process's included. Each once: one that was raised again while
    the error around it was handled is its own context."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "cause", None) or error.__cause__ or error.__context__


def _full(error: BaseException) -> str:
    """What the system said, if it says that there is no room."""
    if isinstance(error, OSError) and error.errno in FULL:
        return f"{os.strerror(error.errno)} ({error.filename})" if error.filename else os.strerror(error.errno)
    text = str(error)  # of libraries that make an error of their own out of it
    return next((words for code in FULL if (words := os.strerror(code)) in text), "")


def where_to_look(run: Path) -> str:
    """The logs of a run that failed: first that of the process in which the user's code did, if one did."""
    found = [path for path in (run / LOGS).glob("*.log") if b"Traceback" in path.read_bytes()]
    own = f"{run}/trainer.log"
    if not found:
        return own
    newest = max(found, key=lambda path: path.stat().st_mtime)
    return f"{newest} (what your code printed and raised there; a file per process) and {own}"


def queue_failed(error: Exception) -> UserError:
    """The queue did not start: its journal is damaged, its directory in use, ..."""
    cause = getattr(error, "cause", None) or error  # Ray's error holds it, with a traceback around it
    return UserError(f"the queue did not start: {last_line(cause)}")


def exit_of(error: SystemExit) -> str:
    """Who called sys.exit, in the middle of a job."""
    place = place_of(error)
    return f"sys.exit({'' if error.code is None else repr(error.code)}) was called" + (f" ({place})" if place else "")


def last_line(error: BaseException) -> str:
    """Of a message of many lines (another process's traceback) the last one, which says what."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
