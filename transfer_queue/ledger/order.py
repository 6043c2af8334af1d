"""The rows of a partition by serial: the number that names a row for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transfer_queue.errors import Invalid, StorageKeyNotFoundError

FIRST_CAPACITY = 64


class Serials:
    """The next serial, of all partitions together. Serials only grow, over all lives of the controller."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, count: int) -> int:
        """The first of `count` consecutive ones."""
        self.next += count
        return self.next - count


class RowOrder:
    """Row ids by serial, which is the order in which rows were made.

    Invariants: the log holds every live row once, by ascending serial, at the place that `_place` names; that of a dead
    row is -1. Rows that died since are skipped, and swept when they are the majority. A serial is looked up in
    O(log rows). What the arrays have beyond their ends is never read, so that no page of it is touched.
    """

    def __init__(self, serials: Serials) -> None:
        self._serials = serials
        self._place = np.empty(FIRST_CAPACITY, np.int32)  # by row id
        self._log_serial = np.empty(FIRST_CAPACITY, np.int64)
        self._log_row = np.empty(FIRST_CAPACITY, np.int32)
        self._end = 0
        self._dead = 0

    def add(self, rows: Sequence[int]) -> None:
        """Give new rows the next serials, in their order."""
        count, top = len(rows), max(rows) + 1
        if top > len(self._place):
            self._place = _grown(self._place, max(len(self._place) * 5 // 4, top))
        while self._end + count > len(self._log_row):
            self._sweep_or_grow(count)
        serial, begin, end = self._serials.take(count), self._end, self._end + count
        self._end = end
        if count == 1:  # quicker than with arrays of one
            self._log_serial[begin], self._log_row[begin], self._place[rows[0]] = serial, rows[0], begin
            return
        self._log_serial[begin:end] = np.arange(serial, serial + count)
        self._log_row[begin:end] = rows
        self._place[self._log_row[begin:end]] = np.arange(begin, end)

    def load(self, serials: np.ndarray, rows: np.ndarray) -> None:
        """What `after(-1)` gave when a snapshot was taken: all live rows, by ascending serial."""
        self._place = np.full(max(FIRST_CAPACITY, int(rows.max(initial=-1)) + 1), -1, np.int32)
        self._place[rows] = np.arange(len(rows))
        self._log_serial, self._log_row = serials.astype(np.int64), rows.astype(np.int32)
        self._end, self._dead = len(rows), 0

    def of(self, rows: Any) -> Any:
        """The serials (int64) of live rows; of one, if one is given."""
        return self._log_serial[self._place[rows]]

    def next_serial(self) -> int:
        """What no row made so far has reached."""
        return self._serials.next

    def erase(self, rows: np.ndarray) -> None:
        self._place[rows] = -1
        self._dead += len(rows)

    def after(self, serial: int, count: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Live rows of higher serial, at most `count` (0: all): serials (int64) and ids, ascending."""
        at = int(np.searchsorted(self._log_serial[: self._end], serial, side="right"))
        need = count or self._end
        picked = [np.empty(0, np.int64)]
        while at < self._end and need > 0:
            stop = min(self._end, at + max(need, 1024))
            rows = self._log_row[at:stop]
            live = np.flatnonzero(self._place[rows] == np.arange(at, stop))[:need]
            picked.append(live + at)
            need, at = need - len(live), stop
        where = np.concatenate(picked)
        return self._log_serial[where], self._log_row[where].astype(np.int64)

    def find(self, serials: np.ndarray) -> np.ndarray:
        """Row ids of serials; -1 for rows that are gone."""
        if not self._end or not len(serials):
            return np.full(len(serials), -1, np.int64)
        at = np.minimum(np.searchsorted(self._log_serial[: self._end], serials), self._end - 1)
        rows = self._log_row[at].astype(np.int64)
        known = (self._log_serial[at] == serials) & (self._place[rows] == at)
        return np.where(known, rows, -1)

    def require(self, serials: np.ndarray, partition: str) -> np.ndarray:
        """Row ids of serials. Raises StorageKeyNotFoundError if one is gone."""
        rows = self.find(serials)
        if (rows < 0).any():
            gone = serials[rows < 0]
            raise StorageKeyNotFoundError(
                f"rows {gone[:5].tolist()} of partition {partition!r} ({len(gone)} of {len(serials)} asked for) were "
                "cleared since this batch was made; retrieve its metadata again"
            )
        return rows

    def _sweep_or_grow(self, count: int) -> None:
        serials, rows = self._log_serial[: self._end], self._log_row[: self._end]
        if 2 * self._dead > self._end:
            live = np.flatnonzero(self._place[rows] == np.arange(self._end))
            self._end, self._dead = len(live), 0
            self._log_serial[: self._end], self._log_row[: self._end] = serials[live], rows[live]
            self._place[self._log_row[: self._end]] = np.arange(self._end)
            return
        size = self._end + max(count, self._end // 4)
        self._log_serial, self._log_row = _grown(serials, size), _grown(rows, size)


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    bigger = np.empty(size, array.dtype)
    bigger[: len(array)] = array
    return bigger


def packed(serials: np.ndarray) -> bytes:
    """Serials as they are in messages."""
    return np.asarray(serials, np.dtype("<i8")).tobytes()


def unpacked(data: bytes) -> np.ndarray:
    """The serials of a message. Raises Invalid if it is cut."""
    if len(data) % 8:
        raise Invalid(f"serials are 8 bytes each, got {len(data)} bytes")
    return np.frombuffer(data, np.dtype("<i8"))
