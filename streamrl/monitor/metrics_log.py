"""`metrics.jsonl`: one JSON object per training step, {"step": k, "<metric>": number, ...}. Names: registry.py.

A validation is a line of its own, {"step": k, "validation": "during", "val-core/...": number, ...}, written when it
ends: one that went on beside training may stand behind later steps.

A run that resumes from the checkpoint of step k cuts the lines after k, and writes those steps again: the file holds
each step once, in order, as the weights went through it. (The event log keeps the abandoned ones.) A number that is
not finite is written as null, and read back as nan.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from streamrl.errors import DamagedFileError
from streamrl.monitor.events import plain
from streamrl.monitor.files import append_line, replace_file

logger = logging.getLogger(__name__)

FILE = "metrics.jsonl"


VALIDATION = "validation"
"""What a line of a validation has beside its numbers: before, during or after."""


def read_metrics(run_dir: Path | str) -> Iterator[dict[str, Any]]:
    """The lines of a run's training steps, in the order of the file; a torn last line is left out.

    Raises DamagedFileError for a damaged line in the middle.
    """
    return (record for record in _read(run_dir) if VALIDATION not in record)


def read_validations(run_dir: Path | str) -> Iterator[dict[str, Any]]:
    """The lines of its validations, likewise."""
    return (record for record in _read(run_dir) if VALIDATION in record)


def _read(run_dir: Path | str) -> Iterator[dict[str, Any]]:
    path = Path(run_dir) / FILE
    if path.exists():
        yield from (record for record, _ in _records(path))


def _records(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = msgspec.json.decode(line, type=dict[str, Any])
                _ = int(record["step"])
            except (ValueError, KeyError, TypeError) as error:  # not JSON, not text, or of something else
                raise DamagedFileError(
                    f"{path}, line {number} is damaged ({error!r}); restore the file or remove the line"
                ) from error
            yield {name: float("nan") if value is None else value for name, value in record.items()}, line


class MetricsLog:
    """The writer. `resume_step` is the step the run was restored to (0: a fresh start); later lines are cut."""

    def __init__(self, run_dir: Path | str, *, resume_step: int = 0) -> None:
        self.path = Path(run_dir) / FILE
        self._encoder = msgspec.json.Encoder(enc_hook=plain)
        if self.path.exists():
            self._cut(resume_step)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o644)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One step, as one append. Raises OSError for a full disk."""
        self._append({"step": step, **metrics})

    def write_validation(self, step: int, label: str, metrics: Mapping[str, Any]) -> None:
        """A validation with the weights of `step`, likewise."""
        self._append({"step": step, VALIDATION: label, **metrics})

    def _append(self, record: dict[str, Any]) -> None:
        append_line(self._fd, self._encoder.encode(record) + b"\n", self.path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut(self, resume_step: int) -> None:
        lines = list(_records(self.path))
        kept = b"".join(line for record, line in lines if _stays(record, resume_step))
        if len(kept) < self.path.stat().st_size:
            replace_file(self.path, kept)
            abandoned = sum(not _stays(record, resume_step) for record, _ in lines)
            logger.info("%s: %d lines after step %d were cut; those steps run again", self.path, abandoned, resume_step)


def _stays(record: dict[str, Any], resume_step: int) -> bool:
    """Whether a run that goes on after `resume_step` does not do this again (trainer/validation_lane.py)."""
    return record["step"] <= resume_step
