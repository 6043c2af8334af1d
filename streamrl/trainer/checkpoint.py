"""Checkpoints: a directory per step that is either whole or absent.

    checkpoints/global_step_40/
        actor/          the ranks' shards (streamrl.workers)
        critic/         likewise, if there is a critic
        trainer.json    step, dispatch cursor, outstanding prompts, configuration digest
        manifest.json   size and digest of every other file; written last, then the directory is renamed into place

The manifest is the truth for the queue's commit position: only after it stands are the rows acked up to its step final.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from streamrl.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1


class CheckpointError(UserError):
    """A checkpoint that cannot be used. The message names it, what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What the trainer itself must know to go on."""

    step: int
    next_order: int
    outstanding: list[int] = field(default_factory=list)
    """Dispatch orders issued but neither trained nor dropped at this step: needed when the queue is lost."""
    validation: dict[str, dict[str, float]] = field(default_factory=dict)
    """Accuracies measured so far, by label ("before", "during": the last one)."""
    kl: dict[str, float] = field(default_factory=dict)
    """State of the KL penalty's coefficient."""
    format: int = FORMAT


class _Manifest(msgspec.Struct):
    """manifest.json: exactly the other files of the checkpoint are in it."""

    format: int
    step: int
    files: dict[str, dict[str, int | str]]


class CheckpointStore:
    """The checkpoints of one run, newest last. `keep` >= 1 of them stay, None: all. A resume goes on from the newest,
    so what was acked up to it is final whatever older ones stay."""

    def __init__(self, directory: Path, *, keep: int | None = 1) -> None:
        self.directory = directory
        self._keep = keep
        self.removed: list[int] = []
        """Steps whose checkpoints the last `save` removed."""

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        names = [path.parent.name for path in self.directory.glob(f"global_step_*/{MANIFEST}")]
        return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"global_step_(\d+)", name)))

    def path(self, step: int) -> Path:
        return self.directory / f"global_step_{step}"

    async def save(self, state: TrainerState, save_ranks: Callable[[Path], Awaitable[object]]) -> int:
        """Write a whole checkpoint and drop the ones beyond `keep`; the step up to which acks are now final.

        `save_ranks` puts a directory per model into the one it is given.

        An error on the way (disk full) leaves the earlier checkpoints as they were.
        """
        draft = self.directory / f".global_step_{state.step}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True, mode=0o700)
        try:
            await save_ranks(draft)
            (draft / "trainer.json").write_text(json.dumps(asdict(state)))
            _seal(draft, state.step)
            target = self.path(state.step)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(draft, target)
            _sync(self.directory)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        steps = self.steps()
        self.removed = steps[: -self._keep] if self._keep else []
        for step in self.removed:
            shutil.rmtree(self.path(step))
        return steps[-1]

    def load(self, step: int) -> TrainerState:
        """The trainer's part, once every file is known to be there, listed and unchanged. Raises CheckpointError."""
        path = self.path(step)
        try:
            manifest = msgspec.convert(json.loads((path / MANIFEST).read_text()), _Manifest)
            state = TrainerState(**json.loads((path / "trainer.json").read_text()))
            restored = msgspec.convert(asdict(state), TrainerState)  # the types of its values
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"checkpoint {path} cannot be read: {type(error).__name__}: {error}. {_REMEDY}"
            ) from error
        if manifest.format != FORMAT or not manifest.step == restored.step == step:
            raise CheckpointError(f"checkpoint {path} has format {manifest.format}, step {manifest.step}. {_REMEDY}")
        there = _files(path)
        if unlisted := sorted(there - manifest.files.keys() - {MANIFEST}):
            raise CheckpointError(f"checkpoint {path} is damaged: {unlisted[0]} is not in {MANIFEST}. {_REMEDY}")
        for name, expected in manifest.files.items():
            if name not in there or _digest(path / name) != expected:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing or has changed. {_REMEDY}")
        return restored


_REMEDY = "Bring it back from a copy, or start anew with trainer.resume_mode=disable"


def _seal(draft: Path, step: int) -> None:
    files: dict[str, dict[str, int | str]] = {}
    for name in sorted(_files(draft)):
        _sync(draft / name)
        files[name] = _digest(draft / name)
    manifest = draft / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1))
    _sync(manifest)
    _sync(draft)


def _files(directory: Path) -> set[str]:
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}


def _digest(file: Path) -> dict[str, int | str]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
    return {"bytes": file.stat().st_size, "blake2b": digest.hexdigest()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
