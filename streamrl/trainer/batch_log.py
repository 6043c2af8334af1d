"""The trainer's own account of what it trained: `batches.jsonl`, one line per step, judged apart from the queue.

A start writes a line {"resume": k}, 0 for a new run: earlier lines of steps above k were undone by it. A line
{"committed": k} says that the queue was told to give up what was trained up to step k; it is "unsaved" where no
checkpoint of that step stands for it (trainer.save_freq=-1).

Each start of the trainer is a lineage, and each step names the one in which it was trained. So weights are known by
(lineage, step): a checkpoint of a step that a resume has undone, or of another run, is told from the one that counts;
and so is a queue (queue_lineage.py).
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from streamrl.errors import DamagedFileError
from streamrl.monitor.files import append_line, cut_torn_line


@dataclass(frozen=True, slots=True)
class TrainedStep:
    step: int
    uids: list[str]
    orders: list[int]
    lineage: str = ""


class BatchLine(msgspec.Struct):
    """One line: a trained step, a start, or what was given up."""

    step: int | None = None
    uids: list[str] = []
    orders: list[int] = []
    lineage: str = ""
    resume: int | None = None
    committed: int | None = None
    unsaved: bool = False


class BatchLog:
    """Append-only; a line is written whole by one write()."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lineage = secrets.token_hex(4)
        cut_torn_line(path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def begins(self, step: int) -> None:
        """The run goes on from `step` (0: from its beginning), in this lineage. On the disk when it returns."""
        self._write({"resume": step, "lineage": self.lineage})
        os.fsync(self._file)

    def trained(self, step: int, uids: list[str], orders: list[int]) -> None:
        self._write({"step": step, "uids": uids, "orders": orders, "lineage": self.lineage})

    def committed(self, step: int, *, saved: bool = True) -> None:
        """The rows trained up to `step` are about to be given up: from here on only its checkpoint can go on, or, where
        none is `saved`, an earlier one with a queue that begins anew."""
        line: dict[str, object] = {"committed": step}
        self._write(line if saved else line | {"unsaved": True})
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, record: dict[str, object]) -> None:
        append_line(self._file, json.dumps(record).encode() + b"\n", self._path)


def last_committed(path: Path, *, unsaved: bool = False) -> int:
    """The highest step that counts whose rows were given up for its checkpoint, or (`unsaved`) without one as well; 0
    if none were."""
    last = 0
    for line in batch_lines(path):
        if line.resume is not None:
            last = min(last, line.resume)
        elif line.committed is not None and (unsaved or not line.unsaved):
            last = max(last, line.committed)
    return last


def lineages(path: Path) -> set[str]:
    """All lives of the run that the log knows."""
    return {line.lineage for line in batch_lines(path) if line.lineage}


def other_lineage(path: Path, step: int, lineage: str) -> str:
    """What the log knows `step` as, if that is not `lineage`; empty if it is, or if the log cannot tell.

    A log that lost its end (with the machine) may not know the step, but then knows the lineage from steps before.
    """
    steps = {trained.step: trained.lineage for trained in read_batch_log(path)}
    known = set(filter(None, steps.values()))
    if not lineage or not known or (lineage in known and steps.get(step, lineage) == lineage):
        return ""
    return steps.get(step) or "unknown"


def batch_lines(path: Path) -> Iterator[BatchLine]:
    """The whole lines, one in memory at a time; a torn last one is left out. Raises DamagedFileError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        yield from _decoded(path, file)


def _decoded(path: Path, lines: Iterable[bytes]) -> Iterator[BatchLine]:
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            yield msgspec.json.decode(line, type=BatchLine)
        except ValueError as error:
            raise DamagedFileError(
                f"{path}, line {number} is damaged ({error}); restore the file, or start anew with "
                "trainer.resume_mode=disable"
            ) from error


def read_batch_log(path: Path) -> list[TrainedStep]:
    """The steps that count, in order: what a later resume undid is left out. A torn last line is ignored."""
    steps: dict[int, TrainedStep] = {}
    for line in batch_lines(path):
        if line.resume is not None:
            steps = {step: done for step, done in steps.items() if step <= line.resume}
        elif line.step is not None:
            steps[line.step] = TrainedStep(line.step, line.uids, line.orders, line.lineage)
    return [steps[step] for step in sorted(steps)]
