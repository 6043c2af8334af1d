"""One line of an event file, and how the files of a directory are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from streamrl.monitor.schema import Kind

_FILE = re.compile(r"(?P<process>[A-Za-z0-9_-]+)\.(?P<number>\d{4,})\.jsonl")


class Event(msgspec.Struct, omit_defaults=True):
    """One line. `start` and `end` are the writer's monotonic seconds in the file, wall-clock seconds as read back."""

    kind: Kind
    name: str
    start: float
    end: float = 0.0
    """Of a span; readers set it to `start` for the other kinds."""
    value: int | float | str | None = None
    fields: dict[str, Any] = {}
    process: str = ""
    """Filled in by readers."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def event_files(directory: Path) -> list[tuple[Path, str]]:
    """The event files of a directory with their process names, by process and number."""
    found = []
    for path in directory.glob("*.jsonl"):
        match = _FILE.fullmatch(path.name)
        if match:
            found.append((match["process"], int(match["number"]), path))
    return [(path, process) for process, _, path in sorted(found)]
