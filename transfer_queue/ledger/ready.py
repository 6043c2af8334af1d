"""Groups that can be leased, in dispatch order."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable, Iterator


class ReadyQueue:
    """A set of uids that yields the one of lowest (order, uid) first; all operations are O(log n) amortised.

    Groups mostly come in dispatch order, so most entries stand in a run, at the end of which they were added: 16 bytes
    each, where one of the heap takes 88. The heap has those that came late.

    Invariant: every member has an entry in the run or the heap; entries of former members are skipped, and swept when
    they are the majority.
    """

    def __init__(self) -> None:
        self._members: dict[str, int] = {}
        self._run: list[str] = []
        self._orders = array("q")  # of the run
        self._begin = 0  # where the run begins
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, uid: str) -> bool:
        return uid in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def load(self, members: Iterable[tuple[int, str]]) -> None:
        """Put (order, uid) pairs into an empty queue."""
        self._members = {uid: order for order, uid in members}
        self._sweep()

    def add(self, order: int, uid: str) -> None:
        if uid in self._members:
            return
        self._members[uid] = order
        if not self._run or (self._orders[-1], self._run[-1]) < (order, uid):
            self._run.append(uid)
            self._orders.append(order)
        else:
            heapq.heappush(self._heap, (order, uid))

    def discard(self, uid: str) -> None:
        if self._members.pop(uid, None) is not None:
            entries = len(self._run) - self._begin + len(self._heap)
            if entries > 2 * len(self._members) + 64:
                self._sweep()

    def first(self) -> float:
        """The lowest order; infinite if there is no member."""
        self._skip_former()
        late = self._heap[0][0] if self._heap else math.inf
        return min(late, self._orders[self._begin]) if self._begin < len(self._run) else late

    def pop(self, count: int, up_to: float = math.inf) -> list[str]:
        """Take out up to `count` members of order `up_to` at most, lowest first."""
        taken: list[str] = []
        members, run, orders, heap = self._members, self._run, self._orders, self._heap
        while len(taken) < count and members:
            self._skip_former()
            at = self._begin
            late = at == len(run) or (heap and heap[0] < (orders[at], run[at]))
            order, uid = heap[0] if late else (orders[at], run[at])
            if order > up_to:
                break
            if late:
                heapq.heappop(heap)
            else:
                self._begin += 1
            del members[uid]
            taken.append(uid)
        return taken

    def _skip_former(self) -> None:
        """The first entries of run and heap are of members."""
        members, run, orders, heap = self._members, self._run, self._orders, self._heap
        while heap and members.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        at, end = self._begin, len(run)
        while at < end and members.get(run[at]) != orders[at]:
            at += 1
        if at > 64 and 2 * at > end:
            del run[:at], orders[:at]
            at = 0
        self._begin = at

    def _sweep(self) -> None:
        entries = sorted((order, uid) for uid, order in self._members.items())
        self._run, self._orders = [uid for _, uid in entries], array("q", [order for order, _ in entries])
        self._begin, self._heap = 0, []
