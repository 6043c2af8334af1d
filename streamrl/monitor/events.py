"""The event log: each process appends spans, counters and state changes to files of its own in the run directory.

    log = EventLog(run_dir / "events", process="trainer")
    with log.span("train", step=3) as span:          # `async with` too
        span.add(rows=128)
    log.counter("queue_groups", 12, partition="train", state="ready")
    for event in read_events(run_dir): ...            # all processes, on one wall clock

Produces `events/{process}.{number:04d}.jsonl`: one JSON object a line, written by one append each, so a killed process
leaves at most one torn line, which readers skip. Every start and every rotation opens the next number (a restarted
process never writes behind a torn line) with a `process` line: pid, host and the pair (monotonic, wall clock) by which
readers align processes. Names and fields: schema.py. A full disk costs events, never the run.
"""

from __future__ import annotations

import heapq
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from streamrl.monitor.schema import EVENTS, Kind

logger = logging.getLogger(__name__)

VERSION = 1
_FILE = re.compile(r"(?P<process>[A-Za-z0-9_-]+)\.(?P<number>\d{4,})\.jsonl")

MAX_BYTES = 64 << 20
"""Size at which a file is rotated: about half a million events."""

KEEP_FILES = 16
"""Files kept per process: 1 GiB, so that a run of weeks cannot fill the disk."""


class Event(msgspec.Struct, omit_defaults=True):
    """One line. `start` and `end` are the writer's monotonic seconds in the file, wall-clock seconds as read back."""

    kind: Kind
    name: str
    start: float
    end: float = 0.0
    """Of a span; readers set it to `start` for the other kinds."""
    value: float | str | None = None
    fields: dict[str, Any] = {}
    process: str = ""
    """Filled in by readers."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _tb: TracebackType | None) -> None:
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
    """The writer. Thread-safe; each event is one append of one line.

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
        self._host = host or (_host() if clock is time.monotonic else "virtual")
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

    def span_at(self, name: str, start: float, end: float, /, **fields: Any) -> None:
        """A span measured elsewhere, in this log's clock."""
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


# --- reading ----------------------------------------------------------------------------------------------------


def event_files(directory: Path) -> list[tuple[Path, str]]:
    """The event files of a directory with their process names, by process and number."""
    found = []
    for path in directory.glob("*.jsonl"):
        match = _FILE.fullmatch(path.name)
        if match:
            found.append((match["process"], int(match["number"]), path))
    return [(path, process) for process, _, path in sorted(found)]


class _Aligner:
    """Parses lines and puts their times on the wall clock: one offset per host, that of the first file seen."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(Event)
        self._offsets: dict[str, float] = {}
        self.damaged = 0

    def parse(self, line: bytes, process: str, offset: float) -> tuple[Event | None, float]:
        """The event (None for a damaged line) and the offset that holds from here on."""
        if not line.strip():
            return None, offset
        try:
            event = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.damaged += 1
            return None, offset
        event.process = process
        if event.kind == "process" and isinstance(event.value, (int, float)):
            offset = self._offsets.setdefault(str(event.fields.get("host", process)), event.value - event.start)
        event.start += offset
        event.end = event.end + offset if event.kind == "span" else event.start
        return event, offset


def read_events(run_dir: Path | str) -> Iterator[Event]:
    """All whole events of a run directory, every process merged by the time they ended, on one wall clock.

    Within a process they come in the order of writing (a `span_at` may be older than its neighbours).
    """
    aligner = _Aligner()
    chains: dict[str, list[Path]] = {}
    for path, process in event_files(Path(run_dir) / "events"):
        chains.setdefault(process, []).append(path)
    yield from heapq.merge(*(_read_process(*chain, aligner) for chain in chains.items()), key=lambda e: e.end)


def _read_process(process: str, paths: list[Path], aligner: _Aligner) -> Iterator[Event]:
    for path in paths:
        offset = 0.0
        try:
            file = path.open("rb")
        except FileNotFoundError:  # rotated away meanwhile
            continue
        with file:
            for line in file:
                event, offset = aligner.parse(line, process, offset)
                if event is not None:
                    yield event


class EventTail:
    """Reads a growing run directory: each `poll` returns what was completed since the last one.

        tail = EventTail(run_dir)
        for event in tail.poll(): ...

    It remembers an offset per file and takes whole lines only; new processes and rotated files are picked up.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self._directory = Path(run_dir) / "events"
        self._aligner = _Aligner()
        self._places: dict[Path, tuple[int, float]] = {}

    @property
    def damaged(self) -> int:
        """Lines that could not be read."""
        return self._aligner.damaged

    def poll(self) -> list[Event]:
        events: list[Event] = []
        for path, process in event_files(self._directory):
            position, offset = self._places.get(path, (0, 0.0))
            data = self._whole_lines(path, position)
            for line in data.splitlines():
                event, offset = self._aligner.parse(line, process, offset)
                if event is not None:
                    events.append(event)
            self._places[path] = position + len(data), offset
        events.sort(key=lambda e: e.end)
        return events

    @staticmethod
    def _whole_lines(path: Path, position: int) -> bytes:
        try:
            if path.stat().st_size <= position:
                return b""
            with path.open("rb") as file:
                file.seek(position)
                data = file.read()
        except FileNotFoundError:
            return b""
        return data[: data.rfind(b"\n") + 1]
