"""`metrics.jsonl`: one JSON object per training step, {"step": k, "<metric>": number, ...}. Names: registry.py.

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


def read_metrics(run_dir: Path | str) -> Iterator[dict[str, Any]]:
    """The whole lines of a run's metrics, in the order of the file; a torn last line is left out.

    Raises DamagedFileError for a damaged line in the middle.
    """
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
        line = self._encoder.encode({"step": step, **metrics}) + b"\n"
        append_line(self._fd, line, self.path)

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
        kept = b"".join(line for record, line in lines if record["step"] <= resume_step)
        if len(kept) < self.path.stat().st_size:
            replace_file(self.path, kept)
            abandoned = sum(record["step"] > resume_step for record, _ in lines)
            logger.info("%s: %d lines after step %d were cut; those steps run again", self.path, abandoned, resume_step)
