"""What a controller knows of a storage unit and of its segments."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from transfer_queue.net.messages import Segment, UnitInfo, UnitStats


@dataclass(slots=True)
class Entry:
    """A segment: spare, being written by `writer`, or else sealed; in memory or on disk (`spilled`)."""

    segment: Segment
    writer: str | None = None
    spare: bool = True
    spilled: bool = False


@dataclass(slots=True)
class Unit:
    """A storage unit. `client` is None while it is gone; its files still serve reads."""

    info: UnitInfo
    client: str | None
    segment_bytes: int
    budget: int
    spill_budget: int = 0
    used: int = 0  # bytes of all its segments in memory that are known
    spilled: int = 0  # the same, on disk
    spares: deque[Segment] = field(default_factory=deque)  # of the usual size
    large: list[Segment] = field(default_factory=list)  # made for one request
    durable: list[Segment] = field(default_factory=list)  # the same, of any size and on disk
    making: deque[tuple[int, int, bool]] = field(default_factory=deque)  # (count, nbytes, durable) asked, not answered
    moving: int = 0  # bytes of the segment to which it copies survivors
    sealed: dict[int, None] = field(default_factory=dict)  # those in memory, in the order in which they were sealed
    spilling: dict[int, int] = field(default_factory=dict)  # those it was asked to move to disk, with their bytes
    retry_at: float | None = None
    error: str = ""  # why it could not make segments when it was asked last
    spill_retry_at: float | None = None
    spill_error: str = ""

    def room(self) -> int:
        """Bytes that may still be made in memory."""
        return self.budget - self.used - self.moving - self._making(durable=False)

    def disk_room(self) -> int:
        """Bytes that may still be made on disk, or moved there."""
        return self.spill_budget - self.spilled - self._making(durable=True) - sum(self.spilling.values())

    def made_or_making(self) -> int:
        """Segments of the usual size that are spare, or will be."""
        coming = (n for n, nbytes, durable in self.making if nbytes == self.segment_bytes and not durable)
        return len(self.spares) + sum(coming)

    def _making(self, *, durable: bool) -> int:
        return sum(count * nbytes for count, nbytes, on_disk in self.making if on_disk is durable)

    def add_sealed(self, entry: Entry) -> None:
        """A segment that nobody writes to was found, made, or moved to disk."""
        if entry.spilled:
            self.spilled += entry.segment.nbytes
        else:
            self.used += entry.segment.nbytes
            self.sealed[entry.segment.segment] = None

    def remove(self, entry: Entry) -> None:
        """It has that segment no longer, where it had it."""
        if entry.spilled:
            self.spilled -= entry.segment.nbytes
        else:
            self.used -= entry.segment.nbytes
            self.sealed.pop(entry.segment.segment, None)

    def leave(self) -> list[Segment]:
        """Its process is gone: what it was asked for will not come. The segments that it has for nobody."""
        unused = [*self.spares, *self.large, *self.durable]
        for parts in (self.spares, self.large, self.durable, self.making, self.spilling):
            parts.clear()
        self.client, self.moving, self.retry_at, self.spill_retry_at = None, 0, None, None
        return unused

    def stats(self, segments: int) -> UnitStats:
        return UnitStats(
            unit=self.info.unit, alive=self.client is not None, used=self.used, budget=self.budget, segments=segments,
            spilled=self.spilled, spill_budget=self.spill_budget,
        )  # fmt: skip
