"""Groups that can be leased, in dispatch order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator


class ReadyQueue:
    """A set of uids that yields the one of lowest (order, uid) first; all operations are O(log n) amortised.

    Invariant: every member has an entry in the heap; entries of former members are skipped, and swept when they are
    the majority.
    """

    def __init__(self) -> None:
        self._members: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, uid: str) -> bool:
        return uid in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def load(self, members: Iterable[tuple[int, str]]) -> None:
        """Put (order, uid) pairs into an empty queue."""
        self._heap = sorted(members)
        self._members = {uid: order for order, uid in self._heap}

    def add(self, order: int, uid: str) -> None:
        if uid not in self._members:
            self._members[uid] = order
            heapq.heappush(self._heap, (order, uid))

    def discard(self, uid: str) -> None:
        if self._members.pop(uid, None) is not None and len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(order, uid) for uid, order in self._members.items()]
            heapq.heapify(self._heap)

    def first(self) -> float:
        """The lowest order; infinite if there is no member."""
        while self._heap and self._members.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def pop(self, count: int, up_to: float = math.inf) -> list[str]:
        """Take out up to `count` members of order `up_to` at most, lowest first."""
        taken: list[str] = []
        while len(taken) < count and self._members and self.first() <= up_to:
            _, uid = heapq.heappop(self._heap)
            del self._members[uid]
            taken.append(uid)
        return taken
