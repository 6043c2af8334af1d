"""Reading the event logs of a run directory: all processes merged, on one wall clock.

for event in read_events(run_dir): ...            # a finished, crashed or running run, from its beginning
tail = EventTail(run_dir); tail.poll()            # what is new since the last poll
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

import msgspec

from streamrl.monitor.event_file import Event, event_files


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
    yield from _merged(Path(run_dir) / "events", _Aligner())


def _merged(directory: Path, aligner: _Aligner, places: dict[Path, tuple[int, float]] | None = None) -> Iterator[Event]:
    chains: dict[str, list[Path]] = {}
    for path, process in event_files(directory):
        chains.setdefault(process, []).append(path)
    yield from heapq.merge(*(_read_process(*chain, aligner, places) for chain in chains.items()), key=lambda e: e.end)


def _read_process(
    process: str, paths: list[Path], aligner: _Aligner, places: dict[Path, tuple[int, float]] | None = None
) -> Iterator[Event]:
    """The events of the files of a process; `places` gets how far each was read, and the offset that holds there."""
    for path in paths:
        position, offset = 0, 0.0
        try:
            file = path.open("rb")
        except FileNotFoundError:  # rotated away meanwhile
            continue
        with file:
            for line in file:
                if places is not None and not line.endswith(b"\n"):
                    break  # it may become whole
                position += len(line)
                event, offset = aligner.parse(line, process, offset)
                if event is not None:
                    yield event
        if places is not None:
            places[path] = position, offset


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

    def catch_up(self) -> Iterator[Event]:
        """What is there by now, merged as `read_events` does it, without ever holding it all. Called first and run to
        its end; `poll` goes on from there."""
        yield from _merged(self._directory, self._aligner, self._places)

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
