"""The files of a run directory beside its events, read as they grow or change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from streamrl.monitor.metrics_log import FILE as METRICS
from streamrl.monitor.summary import FILE as SUMMARY

MAX_STEP = 1 << 40


class MetricsTail:
    """metrics.jsonl, which grows by whole lines, and is replaced when a run goes on from an earlier checkpoint."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        self._file: tuple[int, int] | None = None  # device and inode
        self._at = 0
        self._decoder = msgspec.json.Decoder(dict[str, Any])
        self.damaged = 0

    def poll(self) -> tuple[bool, list[dict[str, Any]]]:
        """(Whether all that was read before is void, what is new)."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                known = (stat.st_dev, stat.st_ino)
                anew = self._file is not None and (known != self._file or stat.st_size < self._at)
                if anew or self._file is None:
                    self._file, self._at = known, 0
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return False, []
        data = data[: data.rfind(b"\n") + 1]
        self._at += len(data)
        return anew, [line for line in map(self._line, data.splitlines()) if line is not None]

    def _line(self, line: bytes) -> dict[str, Any] | None:
        try:
            found = self._decoder.decode(line)
            if not 0 <= int(found["step"]) < MAX_STEP:
                raise ValueError(found["step"])
        except (ValueError, KeyError, TypeError, OverflowError):
            self.damaged += 1
            return None
        return found


class SummaryFile:
    """summary.json: how the run ended, once it has; it goes when the run goes on."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / SUMMARY

    def read(self) -> tuple[str, str] | None:
        """(status, error); None while there is none that can be read."""
        try:
            summary = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        return (str(summary.get("status", "")), str(summary.get("error", ""))) if isinstance(summary, dict) else None


def read_config(run_dir: Path) -> dict[str, Any] | None:
    """The configuration; None while it is not there, or damaged."""
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return config if isinstance(config, dict) else None


def last_growth(run_dir: Path, now: float) -> float:
    """When any event file was written last, not in the future; 0.0 without any."""
    times = [path.stat().st_mtime for path in (run_dir / "events").glob("*.jsonl")]
    return min(now, max(times, default=0.0))


def lives(pid: int) -> bool:
    """Whether there is a process with this id on this machine that has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def boot() -> str:
    """What event logs name as their host, here."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
