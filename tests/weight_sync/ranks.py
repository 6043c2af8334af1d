"""Training ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class _Meeting:
    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.numbers: list[Sequence[int]] = [()] * world_size


class ThreadRanks:
    """Implements `Ranks`."""

    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        self.rank, self.world_size, self._meeting = rank, world_size, meeting

    def added_up(self, numbers: Sequence[int]) -> list[int]:
        self._meeting.barrier.wait()
        self._meeting.numbers[self.rank] = numbers
        self._meeting.barrier.wait()
        return [sum(column) for column in zip(*self._meeting.numbers, strict=True)]


def rank_threads(world_size: int) -> list[ThreadRanks]:
    meeting = _Meeting(world_size)
    return [ThreadRanks(rank, world_size, meeting) for rank in range(world_size)]


def on_all(ranks: Sequence[ThreadRanks], work: Callable[[ThreadRanks], T]) -> list[T | Exception]:
    """At the same time; by rank what it returned or raised."""

    def one(rank: ThreadRanks) -> Any:
        try:
            return work(rank)
        except Exception as error:  # noqa: BLE001  # it is what the test looks at
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))
