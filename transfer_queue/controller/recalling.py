"""Which segments are asked back from writers that do not need them now, and when.

open, and somebody waits ──GiveBack──► its writer finishes with it ──Seal──► freed, emptied by a move, or to disk

consumes     what the grants cannot meet; time
produces     pushes GiveBack to writers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from transfer_queue.controller.compaction import is_thin
from transfer_queue.controller.grants import SegmentGrants
from transfer_queue.ledger.blocks import SegmentUse
from transfer_queue.net.messages import GiveBack, Push, Segment
from transfer_queue.storage.memory import whole_pages
from transfer_queue.storage.segments import is_durable

ROUND = 0.5
"""Seconds in which what was asked back usually has come free, the move of its rows included."""

AGAIN = 1.0
"""Seconds after which a writer may be asked again."""


class Recalling:
    """Invariants:

    - Only what brings memory is asked back: a segment that holds nothing, or so little that it is emptied, or that may
      go to disk. One that is well filled stays with its writer, who can use the rest.
    - Those to which nobody has written for longest come first, and no more than are needed; twice as many each time
      that this was not enough, since writers may be stopped, or busy for long.
    - A writer is asked once in AGAIN seconds at most; as long as somebody waits, others are asked once in ROUND.
    """

    def __init__(self, grants: SegmentGrants, use: Mapping[int, SegmentUse], push: Callable[[str, Push], None]) -> None:
        self._grants = grants
        self._use = use
        self._push = push
        self._asked: dict[str, float] = {}  # writer -> when it may be asked again
        self._factor = 1
        self._rest = -inf  # nobody is asked before
        self._due: float | None = None

    def next_due(self) -> float | None:
        """When `plan` should be called again."""
        return self._due

    def plan(self, memory: int, disk: int, now: float) -> None:
        """Ask for so many bytes back, in memory and on disk, as far as that is due."""
        if not memory and not disk:
            self._factor, self._rest, self._due = 1, -inf, None
        elif now < self._rest:
            self._due = self._rest
        else:
            self._asked = {writer: again for writer, again in self._asked.items() if again > now}
            self._ask({False: self._factor * memory, True: self._factor * disk}, now)

    def _ask(self, missing: dict[bool, int], now: float) -> None:
        """`missing`: bytes by whether they are to be on disk."""
        chosen: dict[str, list[int]] = {}
        waits: list[float] = []
        for entry in self._grants.being_written():
            if max(missing.values()) <= 0:
                break
            segment, writer = entry.segment, entry.writer
            durable = is_durable(segment.segment)
            gain = self._gain(segment) if missing[durable] > 0 else 0
            if gain <= 0 or writer is None:
                continue
            if writer in self._asked:
                waits.append(self._asked[writer])
                continue
            missing[durable] -= gain
            chosen.setdefault(writer, []).append(segment.segment)
        for writer, segments in chosen.items():
            self._asked[writer] = now + AGAIN
            self._push(writer, GiveBack(segments))
        self._rest = now + ROUND
        if chosen:
            self._factor = min(2 * self._factor, 1 << 16)
            self._due = self._rest
        else:
            self._due = min(waits, default=None)

    def _gain(self, segment: Segment) -> int:
        """Bytes that come free if the segment is sealed."""
        unit, use = self._grants.units[segment.unit], self._use.get(segment.segment)
        if unit.client is None:
            return 0
        if use is None:
            return segment.nbytes
        spills = unit.spill_retry_at is None and unit.disk_room() >= segment.nbytes
        if spills and not is_durable(segment.segment) and all(table.spills for table in use.puts):
            return segment.nbytes
        return segment.nbytes - whole_pages(use.live) if is_thin(segment.nbytes, use.live) else 0
