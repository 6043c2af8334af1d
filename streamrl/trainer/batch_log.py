"""The trainer's own account of what it trained: `batches.jsonl`, one line per step, judged apart from the queue.

A resume writes a line {"resume": k}: earlier lines of steps above k were undone by it. A line {"committed": k} says
that the queue was told to give up what was trained up to step k.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainedStep:
    step: int
    uids: list[str]
    orders: list[int]


class BatchLog:
    """Append-only; a line is written whole by one write()."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def resumed(self, step: int) -> None:
        self._write({"resume": step})

    def trained(self, step: int, uids: list[str], orders: list[int]) -> None:
        self._write({"step": step, "uids": uids, "orders": orders})

    def committed(self, step: int) -> None:
        """The rows trained up to `step` are about to be given up: from here on only its checkpoint can go on."""
        self._write({"committed": step})

    def close(self) -> None:
        os.close(self._file)

    def _write(self, record: dict[str, object]) -> None:
        line = json.dumps(record).encode() + b"\n"
        written = os.write(self._file, line)
        if written < len(line):  # the disk is full: leave no half line for the next one to join
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, "no room for the batch log; free disk space and resume")


def last_committed(path: Path) -> int:
    """The highest step whose rows were given up; 0 if none were."""
    return max((record["committed"] for record in _records(path) if "committed" in record), default=0)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines; a torn last one is left out."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def read_batch_log(path: Path) -> list[TrainedStep]:
    """The steps that count, in order: what a later resume undid is left out. A torn last line is ignored."""
    steps: dict[int, TrainedStep] = {}
    for record in _records(path):
        if "resume" in record:
            steps = {step: done for step, done in steps.items() if step <= record["resume"]}
        elif "step" in record:
            steps[record["step"]] = TrainedStep(record["step"], record["uids"], record["orders"])
    return [steps[step] for step in sorted(steps)]
