"""Run directories: `runs/<time>-<name>`, with `runs/latest` pointing to the newest that trained something.

config.yaml      the resolved configuration; those before a resume that changed it: config.1.yaml, ...
metrics.jsonl    one line per step            batches.jsonl   what was trained, by the trainer's own account
events/          one event log per process    summary.json    the outcome, with its `status`
checkpoints/     global_step_<k>/             queue/          the queue's journal, keys and address
trainer.log      of the trainer's process     logs/           of agent workers, ranks, servers, and a user's code there
lock             held by the live run
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from streamrl.config.root import StreamRLConfig
from streamrl.config.sections.trainer import TrainerConfig
from streamrl.errors import UserError

FINISHED = "finished"

LOGS = "logs"
"""Of a run directory: a file per agent worker, training rank and LLM server."""

MANIFEST = "manifest.json"
"""Of a checkpoint, which has a config.yaml as well."""

MAX_NAME = 100
"""Characters of a run's name."""

MAX_CANDIDATES = 100
"""How many runs back a resume looks."""


class RunDirectoryError(UserError):
    """A run directory that cannot be used; the message says why and what to do."""


@dataclass(slots=True)
class RunDirectory:
    """One run's directory, locked by this process. `resumed` tells whether it existed before."""

    path: Path
    resumed: bool
    _lock: int = -1
    finished: bool = False
    """Set when the run reached its end: what a resume would need may go."""
    note: str = ""
    """What the user should know: an unfinished run that is not continued, and why."""
    _adopted: bool = False
    _before: str | None = None
    """Where `latest` pointed before this run."""

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def batches(self) -> Path:
        return self.path / "batches.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def queue(self) -> Path:
        return self.path / "queue"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def untouched(self) -> bool:
        """It was there before, with a summary, and has not gone on since: a resume was refused."""
        return self.resumed and not self._adopted and self.summary.exists()

    def adopt(self, resolved: str) -> None:
        """The configuration with which the run goes on from now on, where it differs; the one before stays beside it
        as config.1.yaml, config.2.yaml, ... A summary of how it ended before is one no more."""
        self._adopted = True
        self.summary.unlink(missing_ok=True)
        current = self.path / "config.yaml"
        if _text(current) == resolved:
            return
        names = [re.fullmatch(r"config\.(\d+)\.yaml", path.name) for path in self.path.glob("config.*.yaml")]
        number = 1 + max((int(found[1]) for found in names if found), default=0)
        fresh = self.path / f".config.{os.getpid()}.yaml"
        fresh.write_text(resolved)
        shutil.copyfile(current, self.path / f"config.{number}.yaml")
        fresh.replace(current)

    def give_latest_back(self) -> None:
        """To the run before, if this one ended before its first step: what `latest` names can be looked at."""
        if self._before is None or _latest(self.path.parent) != self.path.name or _has_trained(self.batches):
            return
        with suppress(OSError):
            if (self.path.parent / self._before).is_dir():
                _point_latest(self.path.parent, self._before)

    def release(self) -> None:
        """Give up the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def run_name(config: StreamRLConfig) -> str:
    """What a run is called behind its time: project and experiment, as far as they were given, else its model."""
    trainer, given = config.trainer, TrainerConfig()
    pairs = ((trainer.project_name, given.project_name), (trainer.experiment_name, given.experiment_name))
    chosen = [name for name, default in pairs if name != default]
    name = "-".join(chosen) or Path(config.actor_rollout_ref.model.path).name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:MAX_NAME].strip("-.") or given.experiment_name


def status_of(path: Path) -> str:
    """`status` of the summary: "finished", "interrupted", "failed"; "killed" if the run never wrote one."""
    try:
        return str(json.loads((path / "summary.json").read_text())["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return "killed"


def open_run(
    runs_dir: Path, name: str, resolved: str, *, resume_mode: str, resume_from: Path | None, replayed: str | None = None
) -> RunDirectory:
    """The directory to run in, the one to resume or a new one; `latest` names it then, unless that names the run that
    is `replayed`.

    `auto` resumes the newest run of this name that did not finish and had the same configuration (apart from the
    keys that only say how to resume); a run that differs is left alone, which `note` says. Raises RunDirectoryError.
    """
    run = _opened(runs_dir, name, resolved, resume_mode, resume_from)
    runs_dir = run.path.parent
    before = _latest(runs_dir)
    of_replayed = (
        replayed is not None and before is not None and (runs_dir / before).resolve() == Path(replayed).resolve()
    )
    if before != run.path.name and not of_replayed:
        run._before = before
        with suppress(OSError):  # the link is a convenience
            _point_latest(runs_dir, run.path.name)
    return run


def _opened(runs_dir: Path, name: str, resolved: str, resume_mode: str, resume_from: Path | None) -> RunDirectory:
    if resume_mode == "resume_path":
        if resume_from is None or not (resume_from / "config.yaml").is_file():
            raise RunDirectoryError(
                f"trainer.resume_from_path={resume_from} is no run directory: it has no config.yaml"
            )
        if (resume_from / MANIFEST).is_file():
            raise RunDirectoryError(
                f"trainer.resume_from_path={resume_from} is a checkpoint; give its run, {resume_from.parent.parent}, "
                "which goes on from its newest one. For the weights alone of this one, `streamrl export` makes a model "
                "to start from"
            )
        return _lock(resume_from, resumed=True)
    note = ""
    if resume_mode == "auto":
        for candidate in _newest_first(runs_dir, name):
            _check_readable(candidate)
            if not resumable(candidate):
                continue
            different = _differing(candidate, resolved)
            try:
                if not different:
                    return _lock(candidate, resumed=True)
                _lock(candidate, resumed=True).release()
                note = note or _not_continued(candidate, different)
            except RunDirectoryError:
                continue  # that run is alive: this is another one
    run = _create(runs_dir, name, resolved)
    run.note = note
    return run


def _not_continued(path: Path, different: list[str]) -> str:
    keys = ", ".join(different[:4]) + (", ..." if len(different) > 4 else "")
    return (
        f"the unfinished run {path} is not continued, since {keys} differ{'s' * (len(different) == 1)}; "
        f"trainer.resume_mode=resume_path trainer.resume_from_path={path} continues it with the values given now"
    )


def _create(runs_dir: Path, name: str, resolved: str) -> RunDirectory:
    stem = time.strftime("%Y%m%d-%H%M%S")
    draft = runs_dir / f".{stem}-{name}.{os.getpid()}"
    try:
        draft.mkdir(parents=True, mode=0o700)
        (draft / "config.yaml").write_text(resolved)
        for folder in ("checkpoints", "events", "queue"):
            (draft / folder).mkdir(mode=0o700)
        path = _settle(draft, runs_dir, stem, name)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise RunDirectoryError(f"no run directory can be made in {runs_dir}: {error}; see trainer.runs_dir") from error
    return _lock(path, resumed=False)


def _latest(runs_dir: Path) -> str | None:
    """What `latest` names."""
    try:
        return os.readlink(runs_dir / "latest")
    except OSError:
        return None


def _point_latest(runs_dir: Path, name: str) -> None:
    link = runs_dir / f".latest.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(runs_dir / "latest")


def _has_trained(batches: Path) -> bool:
    try:
        return b'"uids"' in batches.read_bytes()
    except OSError:
        return False


def _settle(draft: Path, runs_dir: Path, stem: str, name: str) -> Path:
    """Give a complete directory its name; a run of the same second gets the next one."""
    for attempt in range(100):
        path = runs_dir / (f"{stem}-{name}" if attempt == 0 else f"{stem}.{attempt}-{name}")
        try:
            draft.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return path
    raise FileExistsError(f"there are 100 runs named {stem}*-{name}; try again in a second")


def _lock(path: Path, *, resumed: bool) -> RunDirectory:
    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise RunDirectoryError(f"{path} is in use by a live run; stop that one first") from None
    return RunDirectory(path, resumed, handle)


def _newest_first(runs_dir: Path, name: str) -> list[Path]:
    runs = [path for path in runs_dir.glob(f"*-{name}") if _is_run(path) and not path.is_symlink()]
    return sorted(runs, key=lambda path: path.name, reverse=True)[:MAX_CANDIDATES]


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() or _checkpoint(path) is not None


def _checkpoint(path: Path) -> Path | None:
    """A checkpoint of the run, if it has any; its newest."""
    found = [manifest.parent for manifest in path.glob(f"checkpoints/global_step_*/{MANIFEST}")]
    return max(found, key=lambda path: (len(path.name), path.name), default=None)


def _check_readable(path: Path) -> None:
    """Raises RunDirectoryError for an unfinished run that has a checkpoint, and whose configuration nobody can read:
    whether it is to go on is not known."""
    if _read(path) is not None or status_of(path) == FINISHED or (checkpoint := _checkpoint(path)) is None:
        return
    raise RunDirectoryError(
        f"{path}/config.yaml is missing or damaged, and the run has not finished: bring it back (that of its newest "
        f"checkpoint is {checkpoint}/config.yaml), then it goes on; or start anew with trainer.resume_mode=disable"
    )


def resumable(path: Path) -> bool:
    """Whether it has not finished and kept what a resume needs: a checkpoint, or the queue's rows until the first."""
    config = _read(path)
    if status_of(path) == FINISHED or config is None:
        return False
    every = config["trainer"].get("save_freq")
    return _checkpoint(path) is not None or (isinstance(every, int) and every > 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _read(path: Path) -> dict[str, Any] | None:
    """The configuration of a run; None if it is damaged."""
    try:
        config = yaml.safe_load((path / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return config if isinstance(config, dict) and isinstance(config.get("trainer"), dict) else None


def _differing(path: Path, resolved: str) -> list[str]:
    """The keys in which the configuration of a run differs; all of them if it is damaged."""
    config = _read(path)
    before = dict(_leaves(_comparable(config))) if config else {}
    now = dict(_leaves(_comparable(yaml.safe_load(resolved))))
    return [key for key in {**now, **before} if key not in before or key not in now or before[key] != now[key]]


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


ONLY_KEPT = (
    "runs_dir", "resume_mode", "resume_from_path", "rollout_data_dir", "validation_data_dir", "log_val_generations",
    "logger", "max_actor_ckpt_to_keep", "ckpt_keep_interval", "ckpt_include_rows",
)  # fmt: skip
"""Of `trainer`: what says where the run lies, how to resume, or what to keep and show; nothing that is computed."""

RANKS = ("nnodes", "n_gpus_per_node")
"""Of `trainer`: a checkpoint loads on any number of ranks. Sums over ranks then round otherwise in the last bits."""


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    """Without what may differ between a run and its resume."""
    trainer = {k: v for k, v in config["trainer"].items() if k not in (*ONLY_KEPT, *RANKS)}
    return {**config, "monitor": None, "trainer": trainer}
