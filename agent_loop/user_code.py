"""Where an exception came from, seen by the user: the last line of a file of theirs that it passed."""

from __future__ import annotations

import linecache
import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType

logger = logging.getLogger(__name__)

LONGEST_LINE = 100
"""Characters shown of the line."""

LINES_OF_STACK = 4
"""Innermost calls shown of code that does not return."""

_OURS = str(Path(__file__).resolve().parents[1])
_PACKAGES = tuple(f"{_OURS}/{name}/" for name in ("agent_loop", "streamrl", "transfer_queue"))
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def place_of(error: BaseException) -> str:
    """`/home/me/reward.py:12 in compute_score: return 1 / 0`, or "" if no file of the user was on its way. Of an error
    that was made out of another (`raise ... from`), the place of the first of them that has one."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        found = [(frame, line) for frame, line in _frames(current) if _is_users(frame)]
        if found:
            frame, line = found[-1]
            code = frame.f_code
            text = linecache.getline(code.co_filename, line).strip()[:LONGEST_LINE]
            return f"{code.co_filename}:{line} in {code.co_name}" + (f": {text}" if text else "")
        current = current.__cause__ or current.__context__
    return ""


def told(error: BaseException, *, whole: bool = True) -> str:
    """`KeyError: 'x' (/home/me/reward.py:12 in f: ...)`, on one line; of a long message its first one unless `whole`.
    Of an error that came from another process the place is its note, since its traceback stayed there."""
    places = getattr(error, "__notes__", None) or [place for place in (place_of(error),) if place]
    where = f" ({'; '.join(places)})" if places else ""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {' '.join(lines if whole else lines[:1])}{where}"


@contextmanager
def watched(seconds: float, message: str) -> Iterator[None]:
    """Code of the user that has the thread: `message`, and where it is, are logged if it still has after `seconds`."""
    thread = threading.get_ident()

    def tell() -> None:
        frame = sys._current_frames().get(thread)
        stack = traceback.format_stack(frame) if frame else []
        logger.error("%s; it is at:\n%s", message, "".join(stack[-LINES_OF_STACK:]))

    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def with_place(error: Exception) -> Exception:
    """The error, with its place as a note, to be sent to another process."""
    if place := place_of(error):
        error.add_note(place)
    return error


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    return walk_tb(error.__traceback__)


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith(("<", *_PACKAGES, *_LIBRARIES))
