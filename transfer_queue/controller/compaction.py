"""Which segments are emptied by moving what still lives in them, and when.

sealed and less than a quarter live ──quiet for a while──► Compact ──Compacted──► Move ──► freed

consumes     segments in which something died or that were sealed; what units answer; time
produces     pushes Compact to units; mutations Move for the ledger
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from transfer_queue.controller.grants import SegmentGrants
from transfer_queue.controller.unit_record import Unit
from transfer_queue.errors import Invalid
from transfer_queue.ledger import Ledger
from transfer_queue.ledger.moving import Batch, split, survivors
from transfer_queue.ledger.partition import Partition
from transfer_queue.net.messages import Block, Compact, Compacted, Move, Push, Survivors
from transfer_queue.storage.memory import PAGE
from transfer_queue.storage.segments import is_durable, unit_of

log = logging.getLogger(__name__)

THIN = 4
"""A segment of which less than this fraction lives is emptied: four times the memory comes back that the copy takes."""

LEAST = 8 * PAGE
"""Smaller segments are left: their survivors would take as many pages."""

QUIET, QUIET_IF_PRESSED = 1.0, 0.2
"""Seconds that a segment has to be thin; fewer when somebody waits for memory. What clears rows one by one soon clears
the rest, for nothing."""

PAUSE = 10.0
"""Seconds after which segments that could not be emptied are tried again."""

MAX_SOURCES = 64
"""Segments that are looked at together."""


@dataclass(slots=True)
class _Job:
    """What one unit has been asked to copy."""

    unit: Unit
    client: str
    partition: Partition
    segments: list[int]
    batches: list[Batch]
    spilled: bool


class Compaction:
    """Invariants:

    - A unit has one job at a time, of rows of one partition and segments of the unit, all in memory, or all on disk and
      all durable or none.
    - Only sealed segments are emptied, so nothing comes into them meanwhile.
    - A row is where the ledger says before and after: Move names rows by serial and changes only those whose place is
      still the one that was copied. What was copied for nothing is freed.
    """

    def __init__(self, ledger: Ledger, grants: SegmentGrants, push: Callable[[str, Push], None]) -> None:
        self._ledger = ledger
        self._grants = grants
        self._push = push
        self._thin: dict[int, dict[int, float]] = {}  # by unit, segment: since when, in this order
        self._stuck: dict[int, float] = {}  # until when
        self._jobs: dict[int, _Job] = {}
        self._quiet = QUIET

    def consider(self, segments: Iterable[int], now: float) -> None:
        """Something died in these, or they were sealed."""
        for segment in segments:
            self._stuck.pop(segment, None)
            self._note(segment, now)

    def next_due(self) -> float | None:
        """When `plan` should be called again."""
        firsts = [next(iter(thin.values())) for unit, thin in self._thin.items() if thin and self._is_idle(unit)]
        return min(firsts) + self._quiet if firsts else None

    def plan(self, now: float, *, pressed: bool) -> None:
        """Ask idle units to empty what is due; `pressed`: somebody waits for memory."""
        self._quiet = min(QUIET, QUIET_IF_PRESSED) if pressed else QUIET
        for segment in [segment for segment, until in self._stuck.items() if until <= now]:
            del self._stuck[segment]
            self._note(segment, now - QUIET)
        for number, thin in self._thin.items():
            if not thin or not self._is_idle(number):
                continue
            due = [segment for segment, since in thin.items() if since + self._quiet <= now]
            self._start(number, self._grants.units[number], due, now)

    def done(self, client: str, m: Compacted, now: float) -> Move | None:
        """The answer to Compact; what is to be done with it. Raises Invalid for an answer to nothing."""
        job = self._jobs.pop(m.unit, None)
        if job is None or job.client != client or self._grants.units.get(m.unit) is not job.unit:
            raise Invalid(f"unit {m.unit} was not asked to move rows; forget them")
        job.unit.moving = 0
        self._grants.changed = True
        if m.error or m.segment is None:
            log.warning("unit %d could not move rows: %s", m.unit, m.error)
            self._stuck |= dict.fromkeys(job.segments, now + PAUSE)
            return None
        _check(m, job)
        self._grants.adopt(m.segment, spilled=job.spilled)
        for segment in job.segments:
            self._note(segment, now - QUIET)
        p = job.partition
        if self._ledger.partitions.get(p.name) is not p:
            return None
        return Move(p.name, job.segments, [b.moved(blocks) for b, blocks in zip(job.batches, m.blocks, strict=True)])

    def _note(self, segment: int, since: float) -> None:
        thin = self._thin.setdefault(unit_of(segment), {})
        if self._is_thin(segment):
            thin.setdefault(segment, since)
        else:
            thin.pop(segment, None)

    def _is_thin(self, segment: int) -> bool:
        nbytes, use = self._grants.sealed_bytes(segment), self._ledger.segments.use.get(segment)
        return use is not None and is_thin(nbytes, use.live)

    def _is_idle(self, number: int) -> bool:
        """Whether the unit is there, and has nothing to move."""
        unit = self._grants.units.get(number)
        return unit is not None and unit.client is not None and not self._busy(number)

    def _busy(self, unit: int) -> bool:
        job = self._jobs.get(unit)
        if job is not None and (self._grants.units.get(unit) is not job.unit or job.unit.client != job.client):
            del self._jobs[unit]
            job = None
        return job is not None

    def _start(self, number: int, unit: Unit, due: list[int], now: float) -> None:
        """Ask for the survivors of the segments that share a partition with the oldest of these."""
        thin = self._thin[number]
        for segment in due:
            p = self._partition_in(segment) if self._is_thin(segment) else None
            if p is None:
                thin.pop(segment, None)
                continue
            use = self._ledger.segments.use
            disk = self._grants.is_spilled(segment)
            kind = disk, is_durable(segment)
            alike = (s for s in due if s != segment and (self._grants.is_spilled(s), is_durable(s)) == kind)
            thin_too = (s for s in alike if self._is_thin(s))
            others = (s for s in thin_too if p.rows.puts in use[s].puts)
            segments = [segment, *(s for s, _ in zip(others, range(MAX_SOURCES - 1), strict=False))]
            batches = survivors(p.rows, segments, unit.segment_bytes)
            for each in segments:
                thin.pop(each, None)
            if not batches:
                continue
            assert unit.client is not None
            self._jobs[number] = _Job(unit, unit.client, p, segments, batches, disk)
            unit.moving = 0 if disk else sum(batch.nbytes() for batch in batches)
            self._push(unit.client, Compact([Survivors(list(split(batch))) for batch in batches], disk))
            return

    def _partition_in(self, segment: int) -> Partition | None:
        tables = self._ledger.segments.use[segment].puts
        return next((p for p in self._ledger.partitions.values() if p.rows.puts in tables), None)


def is_thin(nbytes: int, live: int) -> bool:
    """Whether a sealed segment of `nbytes` in which so many live is emptied."""
    return nbytes >= LEAST and THIN * live < nbytes


def _check(m: Compacted, job: _Job) -> None:
    """The blocks are those that were asked for. Raises Invalid."""
    segment = m.segment
    assert segment is not None
    if is_durable(segment.segment) is not is_durable(job.segments[0]):
        raise Invalid(f"unit {m.unit} moved rows to segment {segment.segment:016x}, which is of another durability")
    if len(m.blocks) != len(job.batches):
        raise Invalid(f"unit {m.unit} moved {len(m.blocks)} batches of {len(job.batches)}")
    for blocks, batch in zip(m.blocks, job.batches, strict=True):
        wanted = [(b.field, b.kind, b.dtype, b.shape) for b in batch.sources[0][0]]
        if [(b.field, b.kind, b.dtype, b.shape) for b in blocks] != wanted:
            raise Invalid(f"unit {m.unit} moved other fields than those asked for")
        if not all(_within(block, segment.segment, segment.nbytes, len(batch.serials)) for block in blocks):
            raise Invalid(f"unit {m.unit} moved rows to places outside segment {segment.segment:016x}")


def _within(block: Block, segment: int, nbytes: int, rows: int) -> bool:
    inside = 0 <= block.offset <= block.offset + block.nbytes <= nbytes
    return block.segment == segment and block.rows == rows and inside
