"""The trainer's own account of what it trained: `batches.jsonl`, one line per step, judged apart from the queue.

A resume writes a line {"resume": k}: earlier lines of steps above k were undone by it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path


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

    def close(self) -> None:
        os.close(self._file)

    def _write(self, record: dict[str, object]) -> None:
        os.write(self._file, json.dumps(record).encode() + b"\n")


def read_batch_log(path: Path) -> list[TrainedStep]:
    """The steps that count, in order: what a later resume undid is left out. A torn last line is ignored."""
    steps: dict[int, TrainedStep] = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "resume" in record:
            steps = {step: done for step, done in steps.items() if step <= record["resume"]}
        else:
            steps[record["step"]] = TrainedStep(record["step"], record["uids"], record["orders"])
    return [steps[step] for step in sorted(steps)]
