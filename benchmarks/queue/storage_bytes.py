"""What a queue takes: bytes of files, and private memory of processes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def file_bytes(directories: Iterable[Path], ending: str = "") -> int:
    """Sum of the sizes of all files below, those whose name ends so; what is removed meanwhile counts nothing."""
    total = 0
    for directory in directories:
        for path in directory.rglob(f"*{ending}"):
            try:
                if path.is_file():
                    total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total


def private_bytes(pids: Iterable[int]) -> int:
    """Sum of RssAnon; a process that is gone counts nothing."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    return total
