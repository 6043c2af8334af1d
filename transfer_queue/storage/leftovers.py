"""Storage directories of queues that are gone: told by a lock that nobody holds.

    <parent>/tq-<run>/lock, owner (the directory of the queue service), unit-0/, unit-1/, ...

A run that was killed may be started again and finds its segments; so they go only when its directory is gone too.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path

from transfer_queue.storage.unit_files import try_lock

log = logging.getLogger(__name__)

PREFIX = "tq-"

LOCAL_PREFIX = "tq-local-"
"""Storage of a LocalQueue without a directory: of no use to anybody once its process is gone."""

_YOUNG = 60.0
"""Seconds in which a directory may not be locked yet by the process that makes it."""


def remove_leftovers(parent: Path) -> None:
    """Remove what dead queues left in `parent` and can never be used again; log what could be."""
    for home in parent.glob(PREFIX + "*"):
        try:
            _look_at(home)
        except OSError as error:  # another process removes it at the same time, or it is not ours
            log.debug("%s: %s", home, error)


def _look_at(home: Path) -> None:
    info = home.stat(follow_symlinks=False)
    if not home.is_dir() or home.is_symlink() or info.st_uid != os.getuid() or time.time() - info.st_mtime < _YOUNG:
        return
    fd = os.open(home / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not try_lock(fd):
            return
        owner = home / "owner"
        directory = Path(owner.read_text()) if owner.exists() else None
        if directory is not None and any((directory / name).exists() for name in ("run.json", "journal")):
            log.info("%s keeps the bytes of the stopped queue in %s; remove both if it is not wanted", home, directory)
            return
        if directory is None and not home.name.startswith(LOCAL_PREFIX):
            return
        log.info("removing %s, storage of a queue that is gone", home)
        shutil.rmtree(home)
    finally:
        os.close(fd)
