"""Which uids a partition has ever finished with, in little memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from transfer_queue.keys import prompt_uid, split_prompt_uid


class SeenUids:
    """A set of uids that hardly ever loses one.

    Uids made by `prompt_uid` are kept as runs of consecutive positions per epoch, which stay few because prompts finish
    roughly in order; all others are kept as they are.
    """

    def __init__(self) -> None:
        self._runs: dict[int, list[list[int]]] = {}  # epoch -> sorted, disjoint, non-adjacent [first, last + 1]
        self._others: set[str] = set()

    def __contains__(self, uid: str) -> bool:
        parts = split_prompt_uid(uid)
        if parts is None:
            return uid in self._others
        runs = self._runs.get(parts[0], [])
        at = bisect_right(runs, parts[1], key=lambda run: run[0]) - 1
        return at >= 0 and parts[1] < runs[at][1]

    def __bool__(self) -> bool:
        return bool(self._runs or self._others)

    def __iter__(self) -> Iterator[str]:
        for epoch, runs in self._runs.items():
            for first, end in runs:
                yield from (prompt_uid(epoch, position) for position in range(first, end))
        yield from self._others

    def add(self, uid: str) -> None:
        parts = split_prompt_uid(uid)
        if parts is None:
            self._others.add(uid)
            return
        epoch, position = parts
        runs = self._runs.setdefault(epoch, [])
        at = bisect_right(runs, position, key=lambda run: run[0])
        if at and position < runs[at - 1][1]:
            return
        joins_left = at > 0 and runs[at - 1][1] == position
        joins_right = at < len(runs) and runs[at][0] == position + 1
        if joins_left and joins_right:
            runs[at - 1][1] = runs.pop(at)[1]
        elif joins_left:
            runs[at - 1][1] = position + 1
        elif joins_right:
            runs[at][0] = position
        else:
            runs.insert(at, [position, position + 1])

    def discard(self, uid: str) -> None:
        """As if it had never been added."""
        parts = split_prompt_uid(uid)
        if parts is None:
            self._others.discard(uid)
            return
        epoch, position = parts
        runs = self._runs.get(epoch, [])
        at = bisect_right(runs, position, key=lambda run: run[0]) - 1
        if at < 0 or position >= runs[at][1]:
            return
        first, end = runs[at]
        runs[at : at + 1] = [run for run in ([first, position], [position + 1, end]) if run[0] < run[1]]
        if not runs:
            del self._runs[epoch]

    def dump(self) -> object:
        return [list(self._runs.items()), list(self._others)]

    def load(self, value: Any) -> None:
        runs, others = value
        self._runs = {epoch: [list(run) for run in found] for epoch, found in runs}
        self._others = set(others)

    def logical_form(self) -> object:
        """Plain values that are equal for equal sets."""
        return [sorted(self._runs.items()), sorted(self._others)]
