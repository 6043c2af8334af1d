"""The directory of a run's weights, while the run lives, and those that killed runs left.

    <parent>/streamrl-weights-<run>/lock, owner (the run's directory), versions

A run removes its own when it ends. One that was killed leaves it in shared memory, and its next start finds it there.
Where there will be none, since the run's directory is gone too (deleted, or moved), the next start of any run of the
same user removes it, and so does `streamrl runs --clean`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl.errors import UserError
from streamrl.weight_sync.shared_memory import make_private
from transfer_queue.errors import Invalid
from transfer_queue.storage.private import open_regular, text_if_there
from transfer_queue.storage.unit_files import lock_file, replace_file, try_lock

PREFIX = "streamrl-weights-"

LOCK_WAIT = 20.0
"""Seconds for the trainer of a run that was killed to be wholly gone."""


@contextmanager
def weights_home(directory: Path, run: Path) -> Iterator[Path]:
    """`directory` for the weights of `run`, held and removed by this process. Raises WeightsNotPrivate, and UserError
    if another process still has it."""
    remove_leftovers(directory.parent)
    make_private(directory)
    try:
        lock = lock_file(directory / "lock", "this run", wait=LOCK_WAIT)
    except Invalid as error:
        raise UserError(str(error)) from error
    try:
        replace_file(directory / "owner", str(run.absolute()))
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def remove_leftovers(parent: Path, *, below: Path | None = None) -> list[Path]:
    """Remove what killed runs of this user left in `parent` whose directories are gone, or lie `below` one; what was
    removed."""
    return [home for home in sorted(parent.glob(f"{PREFIX}*")) if _remove_if_dead(home, below)]


def owner_of(home: Path) -> Path | None:
    """The run directory that a weights directory names."""
    try:
        owner = text_if_there(home / "owner")
    except (OSError, Invalid):
        return None
    return Path(owner) if owner else None


def _remove_if_dead(home: Path, below: Path | None) -> bool:
    try:
        info = home.lstat()
        if home.is_symlink() or not home.is_dir() or info.st_uid != os.geteuid():
            return False
        owner = owner_of(home)
        if owner is None or ((owner / "config.yaml").exists() and (below is None or below not in owner.parents)):
            return False
        lock = open_regular(home / "lock", os.O_RDWR)
    except (OSError, Invalid):  # another process has just removed it
        return False
    try:
        if not try_lock(lock):
            return False
        shutil.rmtree(home, ignore_errors=True)
        return True
    finally:
        os.close(lock)
