"""Which rows each task has consumed: the book-keeping of `get_meta(mode="fetch")`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from transfer_queue.ledger.order import RowOrder

SLICE = 16384
"""Rows that are looked at together, at most."""

FIRST_SLICE = 512
"""At least."""

FIRST_SWEEP = 64
"""Remembered answers from which on those whose rows are gone are looked for."""


class Consumption:
    """One partition's rows by consumer task.

    Invariants: a row is consumed by a task iff `taken[task][row id]` is the row's serial, so that a row id that is used
    again counts as not consumed; `low[task]` is at most the lowest serial of a live row that the task has not consumed.
    The cost of looking for rows is that of those from there on, with arrays, up to as many as are wanted.
    """

    def __init__(self) -> None:
        self.taken: dict[str, np.ndarray] = {}
        self.low: dict[str, int] = {}
        self.remembered: dict[str, dict[str, np.ndarray]] = {}
        self._sweep_at = FIRST_SWEEP

    def unconsumed(self, order: RowOrder, task: str) -> tuple[np.ndarray, np.ndarray]:
        """All live rows that the task has not consumed: serials and row ids, by ascending serial."""
        parts = [part for part in self.slices(order, task) if len(part[0])]
        if not parts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate([serials for serials, _ in parts]), np.concatenate([rows for _, rows in parts])

    def slices(self, order: RowOrder, task: str, size: int = SLICE) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The same slice by slice: the first out of about `size` live rows, the next ones out of more and more."""
        after = self.low.get(task, 0) - 1
        begun = task in self.taken
        size = max(size, FIRST_SLICE)
        while True:
            size = min(size, SLICE)
            seen, ids = order.after(after, size)
            size *= 4
            if not len(seen):
                break
            consumed = self.flags(task, seen, ids)
            serials, rows = seen[~consumed], ids[~consumed]
            after = int(seen[-1])
            if begun:
                begun = not len(serials)
                self.low[task] = after + 1 if begun else int(serials[0])
            yield serials, rows

    def flags(self, task: str, serials: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Whether the task has consumed each row."""
        taken = self.taken.get(task)
        if taken is None:
            return np.zeros(len(rows), bool)
        inside = rows < len(taken)
        return inside & (taken[np.where(inside, rows, 0)] == serials)

    def take(self, task: str, serials: np.ndarray, rows: np.ndarray) -> None:
        """The task consumes rows; the dead ones among them (id -1) are ignored."""
        alive = rows >= 0
        serials, rows = serials[alive], rows[alive]
        taken = self.taken.get(task)
        size = max(64, int(rows.max()) + 1 if len(rows) else 0)
        if taken is None or len(taken) < size:
            bigger = np.full(max(size, 2 * len(taken) if taken is not None else 0), -1, np.int64)
            if taken is not None:
                bigger[: len(taken)] = taken
            taken = self.taken[task] = bigger
        taken[rows] = serials

    def remember(self, task: str, answers: dict[str, np.ndarray], order: RowOrder) -> None:
        """Answers to fetches that are still to come, by the sampler's keys."""
        mine = self.remembered.setdefault(task, {})
        mine.update(answers)
        if len(mine) > self._sweep_at:
            for key in [key for key, serials in mine.items() if (order.find(serials) < 0).all()]:
                del mine[key]
            self._sweep_at = max(FIRST_SWEEP, 2 * len(mine))

    def recall(self, task: str, key: str) -> np.ndarray | None:
        return self.remembered.get(task, {}).get(key)

    def reset(self, tasks: Iterable[str] | None = None) -> None:
        """These tasks (None: all) have consumed nothing."""
        for task in list({*self.taken, *self.remembered}) if tasks is None else tasks:
            self.taken.pop(task, None)
            self.low.pop(task, None)
            self.remembered.pop(task, None)

    def dump(self) -> Iterator[list[Any]]:
        """For `load`; see dump.py."""
        for task, taken in self.taken.items():
            yield ["taken", task, taken.tobytes(), self.low.get(task)]
        for task, answers in self.remembered.items():
            yield ["remembered", task, [[key, serials.tobytes()] for key, serials in answers.items()]]

    def load(self, section: list[Any]) -> None:
        kind, task, *values = section
        if kind == "taken":
            taken, low = values
            self.taken[task] = np.frombuffer(taken, np.int64).copy()
            if low is not None:
                self.low[task] = low
        else:
            self.remembered[task] = {key: np.frombuffer(serials, np.int64) for key, serials in values[0]}

    def logical_form(self, order: RowOrder) -> object:
        """Plain values: the serials consumed and remembered, by task. Equal for states that will behave equally."""
        serials, rows = order.after(-1)
        return {
            "taken": {task: serials[self.flags(task, serials, rows)].tolist() for task in sorted(self.taken)},
            "remembered": {
                task: {key: found.tolist() for key, found in sorted(answers.items()) if (order.find(found) >= 0).any()}
                for task, answers in sorted(self.remembered.items())
            },
        }
