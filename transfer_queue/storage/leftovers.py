"""Storage directories of queues that are gone: told by a lock that nobody holds.

    <parent>/tq-<run>/lock, owner (the directory of the queue service), unit-0/, unit-1/, ...

A run that was killed may be started again and finds its segments; so they go by themselves only when its directory is
gone too, or is one that `init` made for a script without a name for it: nobody will start that one again.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transfer_queue.errors import Invalid
from transfer_queue.net.ending import ANONYMOUS
from transfer_queue.storage.private import open_regular, text_if_there
from transfer_queue.storage.unit_files import try_lock

log = logging.getLogger(__name__)

PREFIX = "tq-"

LOCAL_PREFIX = "tq-local-"
"""Storage of a LocalQueue without a directory: of no use to anybody once its process is gone."""

MARKS = ("run.json", "journal", "node.json")
"""A directory that holds one of these belongs to a queue that can be started again."""

_YOUNG = 60.0
"""Seconds in which a directory may not be locked yet by the process that makes it."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """One storage directory. live: its lock is held. stopped: a queue can go on with it. dead: of no use to anybody."""

    run: str
    path: Path
    state: Literal["live", "stopped", "dead"]
    age: float
    """Seconds since something was last written there."""
    nbytes: int
    owner: str
    """The directory of its queue, if known."""


def find_leftovers(parents: Iterable[Path]) -> list[Leftover]:
    """All storage directories of this user in `parents`, the largest first."""
    found = [_describe(home) for parent in parents for home in _homes(parent)]
    return sorted((one for one in found if one is not None), key=lambda one: -one.nbytes)


def remove_leftover(leftover: Leftover, *, stopped: bool = False) -> bool:
    """Remove it if it is dead, or `stopped` and that is wanted too; whether it was. Looks at the lock again."""
    wanted = {"dead", "stopped"} if stopped else {"dead"}
    try:
        with _Locked(leftover.path) as locked:
            if not locked or _state(leftover.path, locked) not in wanted:
                return False
            if _is_anonymous(leftover.owner):
                shutil.rmtree(leftover.owner)
            shutil.rmtree(leftover.path)
    except OSError as error:  # another process removes it at the same time
        log.debug("%s: %s", leftover.path, error)
        return False
    return True


def remove_leftovers(parent: Path) -> None:
    """Remove what dead queues left in `parent` and can never be used again; log what could be."""
    for leftover in find_leftovers([parent]):
        if leftover.state == "dead" and remove_leftover(leftover):
            log.info("removed %s, storage of a queue that is gone", leftover.path)
        elif leftover.state == "stopped":
            log.info(
                "%s keeps the bytes of the stopped queue in %s; remove both if it is not wanted",
                leftover.path, leftover.owner,
            )  # fmt: skip


class _Locked:
    """The lock of a storage directory while it is looked at: true if nobody else holds it."""

    def __init__(self, home: Path) -> None:
        self._path = home / "lock"

    def __enter__(self) -> bool:
        self._fd = open_regular(self._path, os.O_RDWR)
        return try_lock(self._fd)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _homes(parent: Path) -> Iterator[Path]:
    """Directories of ours that are old enough to be locked if they are in use."""
    for home in parent.glob(PREFIX + "*"):
        try:
            info = home.stat(follow_symlinks=False)
        except OSError:  # it has just been removed
            continue
        if home.is_dir() and not home.is_symlink() and info.st_uid == os.getuid():
            yield home


def _describe(home: Path) -> Leftover | None:
    try:
        with _Locked(home) as locked:
            state = _state(home, locked)
        files = [file.stat(follow_symlinks=False) for file in (home, *home.rglob("*"))]
    except (OSError, Invalid):  # it has just been removed, or is no storage directory
        return None
    age = time.time() - max(info.st_mtime for info in files)
    nbytes = sum(info.st_blocks * 512 for info in files)
    return Leftover(home.name.removeprefix(PREFIX), home, state, age, nbytes, _owner(home))


def _state(home: Path, locked: bool) -> Literal["live", "stopped", "dead"]:
    if not locked:
        return "live"
    if _is_anonymous(_owner(home)) and (home / "lock").stat().st_size:  # it was locked, and its holder is gone
        return "dead"
    if time.time() - home.stat().st_mtime < _YOUNG:
        return "live"
    owner = _owner(home)
    if owner:
        return "stopped" if any(Path(owner, mark).exists() for mark in MARKS) else "dead"
    return "dead" if home.name.startswith(LOCAL_PREFIX) else "stopped"


def _is_anonymous(owner: str) -> bool:
    """Whether this is a directory of ours that was made for one process."""
    mark = Path(owner, ANONYMOUS)
    return bool(owner) and mark.is_file() and mark.stat(follow_symlinks=False).st_uid == os.getuid()


def _owner(home: Path) -> str:
    return text_if_there(home / "owner") or ""
