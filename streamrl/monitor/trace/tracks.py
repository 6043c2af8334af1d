"""The tracks of a trace: processes, threads and counters with their names, and which thread a slice goes to."""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

PROCESSES = ("Trainer", "Training ranks", "Engines", "Agents", "Counters")
"""How processes are sorted, by the first word of their names that is here."""

LONGEST_TEXT = 200


class Place(NamedTuple):
    """A thread of the trace, and an interval of it in microseconds."""

    pid: int
    tid: int
    start: int
    end: int


def micros(seconds: float) -> int:
    return round(seconds * 1e6)


def arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What can be read in a tooltip: numbers, and texts, cut."""
    return {
        name: value[:LONGEST_TEXT] if isinstance(value, str) else value
        for name, value in fields.items()
        if isinstance(value, str | int | float)
    }


class Tracks:
    """Invariant: slices that `place` put on one thread do not overlap; where they would, the lane has more threads."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self._write = write
        self._pids: dict[str, int] = {}
        self._lanes: dict[tuple[str, str], list[tuple[int, int]]] = {}
        """By process and lane: (where its last slice ended, thread), sorted."""
        self._threads = 0
        self._levels: dict[str, float] = {}

    def place(self, process: str, lane: str, start: float, end: float) -> Place:
        """Room for a slice, in seconds, on the thread of the lane that was free last."""
        pid, first, last = self._pid(process), micros(start), micros(end)
        threads = self._lanes.setdefault((process, lane), [])
        at = bisect_right(threads, (first, sys.maxsize)) - 1
        tid = threads.pop(at)[1] if at >= 0 else self._thread(pid, lane, len(threads) + 1)
        insort(threads, (last, tid))
        return Place(pid, tid, first, last)

    def slice(self, place: Place, name: str, args: dict[str, Any]) -> None:
        self._write(sliced(place, name, args))

    def instant(self, place: Place, name: str, args: dict[str, Any]) -> None:
        """At the end of the place, across its process."""
        where = {"pid": place.pid, "tid": place.tid, "ts": place.end}
        self._write({"ph": "i", "s": "p", "name": name, **where, "args": args})

    def counter(self, name: str, at: float, value: float) -> None:
        """A level that holds until the next one; the same again is left out."""
        if self._levels.get(name) != value:
            self._levels[name] = value
            pid = self._pid("Counters")
            self._write({"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": micros(at), "args": {"value": value}})

    def flow(self, number: int, name: str, source: Place, target: Place) -> None:
        """From the end of one slice to another one, which must not have ended by then."""
        common = {"cat": "flow", "id": number, "name": name}
        begin = max(source.start, source.end - 1)
        arrive = max(target.start, begin)
        self._write({"ph": "s", **common, "pid": source.pid, "tid": source.tid, "ts": begin})
        self._write({"ph": "f", "bp": "e", **common, "pid": target.pid, "tid": target.tid, "ts": arrive})

    def _pid(self, process: str) -> int:
        if process not in self._pids:
            pid = self._pids[process] = len(self._pids) + 1
            rank = next((at for at, known in enumerate(PROCESSES) if process.startswith(known)), len(PROCESSES))
            self._name(pid, 0, "process_name", name=process)
            self._name(pid, 0, "process_sort_index", sort_index=rank)
        return self._pids[process]

    def _thread(self, pid: int, lane: str, number: int) -> int:
        """The next thread of a lane."""
        self._threads += 1
        first = 0 if lane == "steps" else 1000 * len(self._lanes)
        self._name(pid, self._threads, "thread_name", name=lane if number == 1 else f"{lane} {number}")
        self._name(pid, self._threads, "thread_sort_index", sort_index=first + number)
        return self._threads

    def _name(self, pid: int, tid: int, what: str, **args: Any) -> None:
        self._write({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args})


def sliced(place: Place, name: str, args: dict[str, Any]) -> dict[str, Any]:
    """A slice as it stands in the file."""
    where = {"pid": place.pid, "tid": place.tid, "ts": place.start, "dur": place.end - place.start}
    return {"ph": "X", "name": name, **where, "args": args}
