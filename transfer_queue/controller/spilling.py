"""Which segments go to disk when a unit's memory is full."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transfer_queue.controller.unit_record import Entry, Unit
from transfer_queue.ledger.blocks import SegmentUse
from transfer_queue.net.messages import Push, Spilled, SpillSegments

PAUSE = 10.0
"""Seconds for which a unit that could not write to disk is left alone."""

MAX_BYTES = 32 << 20
"""Bytes that are moved to disk at once, or one segment: writers wait for all of them, 0.1 to 0.3 s on a disk."""

MAX_REASON = 300
"""Characters of a unit's error that are kept."""


class Spilling:
    """Invariants: only sealed segments go to disk, the oldest first, and none of a partition that is to stay in memory;
    never more than the unit may have there. A unit is asked one thing at a time."""

    def __init__(
        self, push: Callable[[str, Push], None], table: Mapping[int, Entry], use: Mapping[int, SegmentUse]
    ) -> None:
        self._push = push
        self._table = table
        self._use = use

    def ask(self, unit: Unit, nbytes: int) -> bool:
        """Let a unit move segments to disk, so that `nbytes` of memory come free, or some of it; whether it was asked,
        now or before."""
        if unit.spilling:
            return True
        if unit.client is None or unit.spill_retry_at is not None or nbytes <= 0:
            return False
        chosen = self._choose(unit, min(nbytes, MAX_BYTES))
        if chosen:
            unit.spilling.update((segment, self._table[segment].segment.nbytes) for segment, _ in chosen)
            self._push(unit.client, SpillSegments(segments=chosen))
        return bool(chosen)

    def done(self, unit: Unit, m: Spilled, now: float) -> None:
        """These are on disk, but for those that were freed meanwhile."""
        for segment in unit.spilling.keys() & set(m.segments):
            entry = self._table.get(segment)
            if entry is not None and not entry.spilled:
                unit.remove(entry)
                entry.spilled = True
                unit.add_sealed(entry)
        if m.segments:
            unit.retry_at = None
        unit.spilling.clear()
        unit.spill_error = m.error[:MAX_REASON]
        unit.spill_retry_at = now + PAUSE if m.error else None

    def _choose(self, unit: Unit, nbytes: int) -> list[tuple[int, int]]:
        """Segments, and up to where each was written."""
        room, chosen = unit.disk_room(), []
        for segment in unit.sealed:
            size, use = self._table[segment].segment.nbytes, self._use.get(segment)
            if size > room or nbytes <= 0:
                break
            if use is not None and all(table.spills for table in use.puts):
                chosen.append((segment, use.end))
                room, nbytes = room - size, nbytes - size
        return chosen
