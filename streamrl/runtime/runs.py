"""`streamrl runs`: the run directories, how each ended, and what it still holds outside of its directory.

A run that did not finish keeps the queue's rows (usually in /dev/shm) until it is resumed. Without them it resumes as
well, from its checkpoint, and generates again what was not finished then; so `--clean` may free them.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from streamrl.errors import DamagedFileError
from streamrl.monitor.metrics_log import read_metrics
from streamrl.runtime.run_dir import RunDirectory, status_of
from streamrl.runtime.settings import SHARED, weights_dir
from streamrl.weight_sync.leftovers import remove_leftovers
from transfer_queue.storage.leftovers import PREFIX

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    path: Path
    status: str
    """"running", or as in its summary; "killed" without one."""
    steps: int
    held: dict[Path, int] = field(default_factory=dict)
    """Directories outside of its own, with their bytes."""

    saved: bool = False
    """Whether it has a checkpoint."""

    @property
    def nbytes(self) -> int:
        return sum(self.held.values())

    @property
    def came_to_nothing(self) -> bool:
        """It failed or was killed, and left no checkpoint."""
        return self.status in ("failed", "killed") and not self.saved


def find_runs(runs_dir: Path) -> list[Run]:
    """The newest first."""
    found = [path for path in runs_dir.glob("*") if (path / "config.yaml").is_file() and not path.is_symlink()]
    return [_look_at(path) for path in sorted(found, key=lambda path: path.name, reverse=True)]


def clean(run: Run) -> bool:
    """Free what the run holds, unless it lives (again)."""
    lock = _lock(run.path / "lock")
    if lock is None:
        return False
    try:
        free_held(run.path)
    finally:
        os.close(lock)
    return True


def free_held(path: Path) -> None:
    """What the run in this directory holds elsewhere, if no living process has it."""
    for home in _homes(path):
        if not _is_held(home / "lock"):
            shutil.rmtree(home, ignore_errors=True)


def delete(run: Run) -> bool:
    """Delete its directory and what it holds elsewhere, unless it lives (again)."""
    if not clean(run):
        return False
    latest = run.path.parent / "latest"
    lock = _lock(run.path / "lock")
    if lock is None:
        return False
    try:
        if latest.is_symlink() and os.readlink(latest) == run.path.name:
            latest.unlink()
        shutil.rmtree(run.path)
    finally:
        os.close(lock)
    return True


def main(argv: Sequence[str]) -> int:
    """`streamrl runs`; the exit status."""
    parser = argparse.ArgumentParser(
        prog="streamrl runs", description="Runs, how each ended, and the memory that it still holds."
    )
    parser.add_argument("runs_dir", nargs="?", default="runs", metavar="DIR", help="as trainer.runs_dir (runs)")
    parser.add_argument("--hide-failed", action="store_true", help="leave out runs that failed before any checkpoint")
    parser.add_argument(
        "--delete-failed", action="store_true", help="delete the directories of such runs, and all in them"
    )
    parser.add_argument("--clean", action="store_true", help="free what no living run holds; they resume all the same")
    options = parser.parse_args(argv)
    runs_dir = Path(options.runs_dir)
    if not runs_dir.is_dir():
        message = f"error: there is no directory {runs_dir}; give the one that trainer.runs_dir named"
        Console(stderr=True).print(message, soft_wrap=True, markup=False, highlight=False)
        return 2
    console = Console()
    runs = find_runs(runs_dir)
    if options.delete_failed:
        for run in filter(lambda run: run.came_to_nothing, runs):
            done = "deleted" if delete(run) else "left, it runs again"
            console.print(f"{run.path.name}: {done}", soft_wrap=True, markup=False)
        runs = find_runs(runs_dir)
    if options.hide_failed:
        runs = [run for run in runs if not run.came_to_nothing]
    console.print(_table(runs))
    idle = [run for run in runs if run.held and run.status != "running"]
    if idle and not options.clean:
        total = sum(run.nbytes for run in idle) / MIB
        console.print(f"{total:.1f} MiB are held for runs that do not run; --clean frees them", soft_wrap=True)
    for run in idle if options.clean else ():
        places = ", ".join(map(str, run.held))
        done = "freed" if clean(run) else "left, it runs again:"
        console.print(f"{run.path.name}: {done} {run.nbytes / MIB:.1f} MiB in {places}", soft_wrap=True, markup=False)
    for home in remove_leftovers(SHARED) if options.clean else ():
        console.print(f"freed {home}, of a run whose directory is gone", soft_wrap=True, markup=False)
    return 0


def _table(runs: Sequence[Run]) -> Table:
    table = Table("run", "status", "steps", "memory held")
    for column in (2, 3):
        table.columns[column].justify = "right"
    for run in runs:
        table.add_row(run.path.name, run.status, str(run.steps), f"{run.nbytes / MIB:.1f} MiB" if run.held else "")
    return table


def _look_at(path: Path) -> Run:
    running = _is_held(path / "lock")
    steps = 0
    with suppress(DamagedFileError):
        for line in read_metrics(path):
            steps = line["step"]
    held = {home: _bytes_in(home) for home in _homes(path)}
    saved = any(path.glob("checkpoints/*/manifest.json"))
    return Run(path, "running" if running else status_of(path), steps, held, saved)


def _homes(path: Path) -> list[Path]:
    return [home for home in (_storage(path), weights_dir(RunDirectory(path, True))) if home and home.is_dir()]


def _storage(path: Path) -> Path | None:
    """The queue's storage, if it lies elsewhere and is this run's."""
    queue = path.absolute() / "queue"
    try:
        if (queue / "run.json").exists():
            home = Path(json.loads((queue / "run.json").read_text())["storage"])
        else:
            home = Path((queue / "storage").read_text())
        mine = home.name.startswith(PREFIX) and Path((home / "owner").read_text()).resolve() == queue.resolve()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return home if mine else None


def _bytes_in(home: Path) -> int:
    """As the file system counts them: segments are reserved whole."""
    total = 0
    for file in home.rglob("*"):
        with suppress(OSError):  # gone meanwhile
            total += file.lstat().st_blocks * 512
    return total


def _lock(path: Path) -> int | None:
    """The lock, taken; None if a living process has it. Raises FileNotFoundError where there never was one."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _is_held(path: Path) -> bool:
    try:
        handle = _lock(path)
    except OSError:
        return False
    if handle is not None:
        os.close(handle)
    return handle is None
