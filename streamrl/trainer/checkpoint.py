"""Checkpoints: a directory per step that is either whole or absent.

    checkpoints/global_step_40/
        actor/          the ranks' shards, optimizer and generators (streamrl.workers)
        critic/         likewise, if there is a critic
        queue/          the rows of finished groups, if there are any (queue_cut.py)
        trainer.json    step, lineage, dispatch cursor, outstanding prompts, KL coefficient
        config.yaml     the configuration with which it was trained
        manifest.json   size and digest of every other file, and whether it stays for good; written last, then the
                        directory is renamed into place

The manifest is the truth for the queue's commit position: only after it stands are the rows acked up to its step final.
What begins with a dot is no checkpoint: a draft, or one that is being removed; both go with the next `clean`.
`checkpoints` may be a link to a directory elsewhere. A checkpoint may not: it would go by a rename with the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from streamrl.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
T = TypeVar("T")

HASHERS = 8
"""Files whose digests are made at once, if there are cores for it: a core does about 1 GB/s."""


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
    lineage: str = ""
    """Of the life of the run in which the step was trained (batch_log.py)."""
    format: int = FORMAT


class _Manifest(msgspec.Struct):
    """manifest.json: exactly the other files of the checkpoint are in it."""

    format: int
    step: int
    files: dict[str, dict[str, int | str]]
    kept: bool = False
    """It stays for good, whatever later lives of the run ask for."""


class CheckpointStore:
    """The checkpoints of one run, newest last. A resume goes on from the newest, so what was acked up to it is final
    whatever older ones stay."""

    def __init__(
        self, directory: Path, *, keep: int | None = 1, keep_every: int | None = None, in_thread: bool = True
    ) -> None:
        """`keep` >= 1 of them stay, None: all; those of every `keep_every`-th step stay beside these, for good.
        `in_thread=False`: digests are made in the caller's (on a virtual clock)."""
        self.directory = directory
        self._keep, self._keep_every = keep, keep_every
        self._in_thread = in_thread
        self.removed: list[int] = []
        """Steps whose checkpoints the last `seal` removed."""

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending. Raises CheckpointError where they cannot be looked for."""
        if os.path.lexists(self.directory) and not self.directory.is_dir():
            raise CheckpointError(
                f"{self.directory} is no directory, or a link to one that is not there: mount it, or bring it back. "
                "trainer.resume_mode=disable starts anew"
            )
        names = [path.parent.name for path in self.directory.glob(f"global_step_*/{MANIFEST}")]
        return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"global_step_(\d+)", name)))

    def path(self, step: int) -> Path:
        return self.directory / f"global_step_{step}"

    def draft(self, step: int) -> Path:
        """A directory to put a directory per model into; then `seal` or `discard` it."""
        draft = self.directory / f".global_step_{step}.draft"
        self.discard(draft)
        draft.mkdir(parents=True, mode=0o700)
        return draft

    def discard(self, draft: Path) -> None:
        _remove(draft)

    def clean(self) -> None:
        """Remove what killed processes left half written or half removed."""
        for path in self.directory.glob(".global_step_*"):
            _remove(path)

    async def seal(self, draft: Path, state: TrainerState, config: str = "") -> int:
        """The draft is whole: make it the checkpoint of its step and drop the ones beyond `keep`; the step up to which
        acks are now final. An error on the way (disk full) leaves the earlier checkpoints as they were."""
        await self.call(lambda: self._seal(draft, state, config))
        steps = self.steps()
        self.removed = self._beyond(steps)
        for step in self.removed:
            await self.call(lambda step=step: self._remove(step))
        return steps[-1]

    async def save(self, state: TrainerState, save_ranks: Callable[[Path], Awaitable[object]]) -> int:
        """`draft`, `save_ranks` into it, `seal`."""
        draft = self.draft(state.step)
        try:
            await save_ranks(draft)
            return await self.seal(draft, state)
        except BaseException:
            self.discard(draft)
            raise

    async def verified(self, step: int) -> TrainerState:
        """`load`, beside other work."""
        return await self.call(lambda: self.load(step))

    def load(self, step: int) -> TrainerState:
        """The trainer's part, once every file is known to be there, listed and unchanged. Raises CheckpointError."""
        path = self.path(step)
        if path.is_symlink():
            raise CheckpointError(
                f"checkpoint {path} is a link, to {os.readlink(path)}: the next one would take its place. Move the "
                "directory itself there (checkpoints/ as a whole may be a link), or start anew with "
                "trainer.resume_mode=disable"
            )
        try:
            there = _files(path)
            manifest = msgspec.convert(json.loads((path / MANIFEST).read_text()), _Manifest)
            state = TrainerState(**json.loads((path / "trainer.json").read_text()))
            restored = msgspec.convert(asdict(state), TrainerState)  # the types of its values
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"checkpoint {path} cannot be read: {type(error).__name__}: {error}. {REMEDY}"
            ) from error
        if manifest.format != FORMAT:
            raise CheckpointError(
                f"checkpoint {path} has format {manifest.format}, and this version reads {FORMAT}. {REMEDY}"
            )
        if manifest.step != step or restored.step != step:
            other = manifest.step if manifest.step != step else restored.step
            raise CheckpointError(
                f"checkpoint {path} is that of step {other} by its own account: it was renamed, or copied from "
                f"elsewhere; call it global_step_{other} again. {REMEDY}"
            )
        if unlisted := sorted(there - manifest.files.keys() - {MANIFEST}):
            raise CheckpointError(f"checkpoint {path} is damaged: {unlisted[0]} is not in {MANIFEST}. {REMEDY}")
        listed = sorted(manifest.files)
        found = _digests(path, [name for name in listed if name in there])
        for name in listed:
            if found.get(name) != manifest.files[name]:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing or has changed. {REMEDY}")
        return restored

    async def call(self, function: Callable[[], T]) -> T:
        """A function that waits for the disk, beside other work."""
        return await asyncio.to_thread(function) if self._in_thread else function()

    def _seal(self, draft: Path, state: TrainerState, config: str) -> None:
        (draft / "trainer.json").write_text(json.dumps(asdict(state)))
        if config:
            (draft / "config.yaml").write_text(config)
        names = sorted(_files(draft))
        for name in names:
            _sync(draft / name)
        manifest = draft / MANIFEST
        kept = self._keep_every is not None and state.step % self._keep_every == 0
        content = {"format": FORMAT, "step": state.step, "kept": kept, "files": _digests(draft, names)}
        manifest.write_text(json.dumps(content, indent=1))
        _sync(manifest)
        for directory in {draft, *((draft / name).parent for name in names)}:
            _sync(directory)
        target = self.path(state.step)
        _remove(target)
        os.rename(draft, target)
        _sync(self.directory)

    def _beyond(self, steps: list[int]) -> list[int]:
        """The older ones that nothing asks to keep."""
        old = steps[: -self._keep] if self._keep else []
        return [step for step in old if (not self._keep_every or step % self._keep_every) and not self._kept(step)]

    def _kept(self, step: int) -> bool:
        try:
            return msgspec.json.decode((self.path(step) / MANIFEST).read_bytes(), type=_Manifest).kept
        except (OSError, ValueError):
            return False

    def _remove(self, step: int) -> None:
        """By a rename first: a kill on the way leaves nothing that looks like a checkpoint."""
        away = self.directory / f".global_step_{step}.removed"
        _remove(away)
        os.rename(self.path(step), away)
        _remove(away)


REMEDY = "Bring it back from a copy, or start anew with trainer.resume_mode=disable"


def _remove(path: Path) -> None:
    """A directory, or whatever has its name; of a link the link alone. What cannot go stays until the next `clean`."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _files(directory: Path) -> set[str]:
    """Raises ValueError for what is neither a plain file nor a directory: a link, a pipe."""
    found = set()
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{name} is {'a link' if path.is_symlink() else 'no plain file'}")
        if path.is_file():
            found.add(name)
    return found


def _digests(directory: Path, names: Iterable[str]) -> dict[str, dict[str, int | str]]:
    names = list(names)
    with ThreadPoolExecutor(max(1, min(HASHERS, os.cpu_count() or 1, len(names)))) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(directory / name), names), strict=True))


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
