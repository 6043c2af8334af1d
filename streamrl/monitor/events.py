"""The event log: each process appends spans, counters and state changes to files of its own in the run directory.

    log = EventLog(run_dir / "events", process="trainer")
    with log.span("train", step=3) as span:          # `async with` too
        span.add(rows=128)
    log.counter("queue_groups", 12, partition="train", state="ready")

Produces `events/{process}.{number:04d}.jsonl`: one JSON object a line, written by one append each, so a killed process
leaves at most one torn line, which readers skip. Every start and every rotation opens the next number (a restarted
process never writes behind a torn line) with a `process` line: pid, host and the pair (monotonic, wall clock) by which
readers align processes. Names and fields: schema.py.
Reading: `read_events` and `EventTail` (event_reader.py). A full disk costs events, never the run.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from streamrl.monitor.event_file import Event, event_files
from streamrl.monitor.event_reader import EventTail, read_events
from streamrl.monitor.schema import EVENTS

__all__ = ["Event", "EventLog", "EventTail", "Span", "read_events"]

logger = logging.getLogger(__name__)

VERSION = 1

_OTHER_CLOCK = f"clock-{secrets.token_hex(4)}"
"""Host of logs with another clock than the machine's: it begins anew in each process, and is compared with no other."""

MAX_BYTES = 64 << 20
"""Size at which a file is rotated: about half a million events."""

KEEP_FILES = 16
"""Files kept per process: 1 GiB, so that a run of weeks cannot fill the disk."""


class Span:
    """A span under way: a context manager, sync or async. An exception passing through is noted as field `error`."""

    __slots__ = ("_log", "end", "fields", "name", "start")

    def __init__(self, log: EventLog, name: str, fields: dict[str, Any]) -> None:
        self._log, self.name, self.fields = log, name, fields
        self.start = self.end = 0.0

    @property
    def seconds(self) -> float:
        """Its length, once it has ended."""
        return self.end - self.start

    def add(self, **fields: Any) -> None:
        """Fields that are known only by now."""
        self.fields.update(fields)

    def __enter__(self) -> Self:
        self.start = self.end = self._log.clock()
        spec = EVENTS.get(self.name)
        if spec is not None and spec.announced:
            self._log.write(Event("begin", self.name, self.start, fields=self.fields))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end = self._log.clock()
        if kind is not None:
            self.fields["error"] = kind.__name__
        self._log.write(Event("span", self.name, self.start, self.end, fields=self.fields))

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, tb)


def plain(value: Any) -> Any:
    """numpy and torch scalars as Python numbers; anything else as its text."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):  # no scalar
        return str(value)


def _host() -> str:
    """Processes with the same answer share one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


class EventLog:
    """The writer. Thread-safe; each event is one append of one line: 2 to 5 µs, so 500 of them are 0.3 % of a second.

    `directory` None writes nothing (spans still measure). An injected `clock` (a virtual one) gets a `host` of its
    own, so that its times are never compared with real ones.
    """

    def __init__(
        self,
        directory: Path | str | None,
        process: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        host: str | None = None,
        max_bytes: int = MAX_BYTES,
        keep_files: int = KEEP_FILES,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", process):
            raise ValueError(f"process name {process!r}: only letters, digits, '_' and '-' (it names a file)")
        self.directory = Path(directory) if directory is not None else None
        self.process = process
        self.clock = clock
        self.lost = 0
        self._wall = wall
        self._host = host or (_host() if clock is time.monotonic else _OTHER_CLOCK)
        self._max_bytes, self._keep_files = max_bytes, keep_files
        self._encoder = msgspec.json.Encoder(enc_hook=plain)
        self._lock = threading.Lock()
        self._fd, self._size, self._torn = -1, 0, False
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._open_next()

    def span(self, name: str, /, **fields: Any) -> Span:
        """A context manager that writes a span when it is left."""
        return Span(self, name, fields)

    def span_at(self, name: str, start: float, end: float | None, /, **fields: Any) -> None:
        """A span measured elsewhere, in this log's clock; without an end it has only begun (of an announced one)."""
        if end is None:
            self.write(Event("begin", name, start, fields=fields))
        else:
            self.write(Event("span", name, start, end, fields=fields))

    def counter(self, name: str, value: float, /, **labels: Any) -> None:
        self.write(Event("counter", name, self.clock(), value=value, fields=labels))

    def state(self, name: str, value: str | float, /, **labels: Any) -> None:
        self.write(Event("state", name, self.clock(), value=value, fields=labels))

    def step_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """The metrics of one training step, the same dictionary as its line of metrics.jsonl."""
        self.write(Event("metrics", "step_metrics", self.clock(), value=step, fields=metrics))

    def write(self, event: Event) -> None:
        """Append one event."""
        if self.directory is None:
            return
        try:
            line = self._encoder.encode(event) + b"\n"
        except (TypeError, ValueError, OverflowError) as error:  # a field that JSON cannot hold
            self._lose(error)
            return
        with self._lock:
            if self._fd < 0:
                self.lost += 1
                return
            if self._size + len(line) > self._max_bytes:
                self._open_next()
            self._append(line)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        if self._torn:  # an earlier append stopped half way: end that line first
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self._lose(error)
            return
        self._size += written
        self._torn = written < len(line)
        self.lost += self._torn

    def _lose(self, error: Exception) -> None:
        if not self.lost:
            logger.warning("an event of %s cannot be written (%s); the run goes on without it", self.process, error)
        self.lost += 1

    def _open_next(self) -> None:
        """The next free number, with its process line; older files beyond `keep_files` go."""
        assert self.directory is not None
        own = [path for path, process in event_files(self.directory) if process == self.process]
        number = int(own[-1].name.split(".")[1]) + 1 if own else 0
        try:
            fd, path = self._create(number)
        except OSError as error:
            self._lose(error)
            return
        fields: dict[str, Any] = {"version": VERSION, "pid": os.getpid(), "host": self._host}
        if self._fd >= 0:
            os.close(self._fd)
            fields["rotated"] = True
        self._fd, self._size, self._torn = fd, 0, False
        header = Event("process", self.process, self.clock(), value=self._wall(), fields=fields)
        self._append(self._encoder.encode(header) + b"\n")
        for old in [*own, path][: -self._keep_files]:
            old.unlink(missing_ok=True)

    def _create(self, number: int) -> tuple[int, Path]:
        assert self.directory is not None
        while True:
            path = self.directory / f"{self.process}.{number:04d}.jsonl"
            try:
                return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), path
            except FileExistsError:  # a namesake opened it first
                number += 1
