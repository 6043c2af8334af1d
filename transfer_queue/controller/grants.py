"""Segments: which unit has which, who writes in them, and when units are to make or free some.

asked from a unit ──► spare ──grant──► written by one client ──sealed──► read only ──last block died──► freed
                                                                             └─memory short─► on disk ─┘

consumes     units that register, segments made, writers that ask, seal or die, segments whose last block died or that
             were moved to disk
produces     pushes to units: MakeSegments, FreeSegments, SpillSegments
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from transfer_queue.controller.spilling import MAX_REASON, Spilling
from transfer_queue.controller.unit_record import Entry, Unit
from transfer_queue.errors import Invalid, SegmentGone
from transfer_queue.ledger.blocks import SegmentUse
from transfer_queue.net.messages import (
    Block,
    FreeSegments,
    MakeSegments,
    Push,
    RegisterUnit,
    Segment,
    SegmentsMade,
    Spilled,
    UnitStats,
)
from transfer_queue.storage.memory import size_class, whole_pages
from transfer_queue.storage.segments import MAX_UNITS, check_segment_bytes, is_durable, unit_of

RETRY_SECONDS = 1.0
"""Pause after a unit could not make a segment (disk full): it is asked again sooner if something is freed."""

MAX_HINTED = 4
"""Segments granted at most with one commit, so that one writer does not take all that is ready."""


class SegmentGrants:
    """See the module. Invariants:

    - A segment has at most one writer, and never a second one after it.
    - A unit's segments, those being made included, never exceed its budget; but for one of survivors, which soon takes
      the place of several times as much.
    - A segment without live block is freed once it has been sealed, by its writer, by the writer's death or by the
      unit's restart; a segment with a live block is never freed.
    """

    def __init__(
        self,
        push: Callable[[str, Push], None],
        *,
        use: Mapping[int, SegmentUse],
        segment_bytes: int,
        spare_segments: int,
    ) -> None:
        """`use` says, at any time, which segments hold live blocks."""
        self.units: dict[int, Unit] = {}
        self.changed = False
        self._push = push
        self._use = use
        self._segment_bytes = segment_bytes
        self._spare_segments = spare_segments
        self._table: dict[int, Entry] = {}
        self._spilling = Spilling(push, self._table, use)
        self._written: dict[str, set[int]] = {}
        self._open: dict[int, Entry] = {}  # those of all writers, the one to which nobody has written for longest first
        self._sealed: set[int] = set()
        self._turn = 0
        self._pooled: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=MAX_UNITS))  # size -> units, a guess

    # --- units ------------------------------------------------------------------------------------------------

    def missing(self, m: RegisterUnit) -> list[int]:
        """Segments with live blocks that the unit should have and has not, or not in full."""
        has = dict([*m.inventory, *m.spilled])
        mine = ((number, use) for number, use in self._use.items() if unit_of(number) == m.info.unit)
        return sorted(number for number, use in mine if has.get(number, -1) < use.end)

    def register(self, client: str, m: RegisterUnit) -> list[int]:
        """A unit starts, or the controller did: all it has is sealed. The segments it is to keep."""
        number = m.info.unit
        size = m.segment_bytes or self._segment_bytes
        if m.segment_bytes:
            check_segment_bytes(m.segment_bytes)
        if m.budget < size:
            raise Invalid(f"unit {number} has a budget of {m.budget} bytes, less than one segment of {size}")
        for segment in [s for s in self._table if unit_of(s) == number]:
            self._forget(segment)
        unit = self.units[number] = Unit(m.info, client, size, m.budget)
        unit.spill_budget = m.spill_budget
        kept: list[int] = []
        for spilled, inventory in ((False, m.inventory), (True, m.spilled)):
            for segment, nbytes in inventory:
                if segment in self._use:
                    self._add_sealed(Segment(segment, number, nbytes), spilled=spilled)
                    kept.append(segment)
        self.changed = True
        return kept

    def lose(self, number: int) -> None:
        """The unit will not come back: who writes to its segments has to copy anew. An unknown unit is no error."""
        for segment in [s for s in self._table if unit_of(s) == number]:
            self._forget(segment)
        self.units.pop(number, None)
        self.changed = True

    def made(self, client: str, m: SegmentsMade, now: float) -> None:
        """The answer to the oldest MakeSegments. With an error, the unit is left alone for a while, or until it has
        moved something to disk."""
        unit = self.units.get(m.unit)
        if unit is None or unit.client != client or not unit.making:
            raise Invalid(f"unit {m.unit} was not asked for segments; forget them")
        count, nbytes, durable = unit.making.popleft()
        self.changed = True
        failed = m.error or len(m.segments) < count
        if durable:
            unit.spill_error, unit.spill_retry_at = m.error[:MAX_REASON], now + RETRY_SECONDS if failed else None
        else:
            unit.error = m.error[:MAX_REASON]
            if failed:
                unit.retry_at = now + RETRY_SECONDS
                self._spilling.ask(unit, count * nbytes)
        for segment in m.segments[:count]:
            known = segment.segment in self._table or segment.segment in self._use
            right = segment.nbytes == nbytes and is_durable(segment.segment) is durable
            if known or unit_of(segment.segment) != m.unit or not right:
                raise Invalid(
                    f"unit {m.unit} made segment {segment.segment:016x} of {segment.nbytes} bytes; expected a "
                    f"new one of its own of {nbytes}{', on disk' * durable}"
                )
            self._table[segment.segment] = Entry(segment, spilled=durable)
            if durable:
                unit.spilled += nbytes
                unit.durable.append(segment)
            else:
                unit.used += nbytes
                (unit.spares if nbytes == unit.segment_bytes else unit.large).append(segment)

    def client_gone(self, client: str) -> None:
        """A writer's segments are sealed; a unit is not asked any more and its spare segments are not granted."""
        self.seal(client, list(self._written.get(client, ())))
        for unit in self.units.values():
            if unit.client == client:
                for segment in unit.leave():
                    self._forget(segment.segment)

    # --- writers ----------------------------------------------------------------------------------------------

    def check(self, client: str, blocks: Iterable[Block], *, durable: bool = False) -> None:
        """Raise SegmentGone unless all blocks lie in segments (`durable`: on disk) that the client writes; Invalid if
        beyond their end."""
        written = -1
        for block in blocks:
            entry = self._table.get(block.segment)
            if entry is None or entry.writer != client:
                raise SegmentGone(
                    f"segment {block.segment:016x} is not yours to write (any more); copy {block.field!r} anew"
                )
            if durable and not is_durable(block.segment):
                raise SegmentGone(
                    f"segment {block.segment:016x} is in memory, and the partition's durability 'journal'; copy "
                    f"{block.field!r} anew"
                )
            if block.offset + block.nbytes > entry.segment.nbytes:
                raise Invalid(
                    f"column {block.field!r} ends beyond segment {block.segment:016x} ({entry.segment.nbytes} bytes)"
                )
            if block.segment != written:
                written = block.segment
                self._open[written] = self._open.pop(written)

    def grant(self, client: str, nbytes: int, *, durable: bool = False) -> Segment | None:
        """A segment with at least `nbytes` for this writer, by turns from the units; None if there is none now."""
        if durable:
            found = [(s, unit) for unit in self._alive() for s in unit.durable if s.nbytes >= nbytes]
            if not found:
                return None
            segment, unit = min(found, key=lambda one: (one[0].nbytes, one[0].segment))
            unit.durable.remove(segment)
            return self._give(client, unit, segment)
        for unit in self._by_turns():
            if nbytes <= unit.segment_bytes and unit.spares:
                return self._give(client, unit, unit.spares.popleft())
        fitting = [(segment.nbytes, segment, unit) for unit in self._alive() for segment in unit.large]
        fitting = [found for found in fitting if found[0] >= nbytes and nbytes > found[2].segment_bytes]
        if not fitting:
            return None
        _, segment, unit = min(fitting, key=lambda found: found[0])
        unit.large.remove(segment)
        return self._give(client, unit, segment)

    def hint(self, client: str, want: int) -> list[Segment]:
        """Segments towards `want` bytes, as far as there are spare ones."""
        granted: list[Segment] = []
        while want > 0 and len(granted) < MAX_HINTED and (segment := self.grant(client, 1)) is not None:
            granted.append(segment)
            want -= segment.nbytes
        return granted

    def seal(self, client: str, segments: Collection[int]) -> None:
        """The writer has finished with segments; those it does not write are ignored."""
        mine = self._written.get(client, set())
        for segment in segments:
            if segment in mine:
                mine.remove(segment)
                entry = self._open.pop(segment)
                entry.writer = None
                if not entry.spilled:
                    self.units[entry.segment.unit].sealed[segment] = None
                self._sealed.add(segment)
        if not mine:
            self._written.pop(client, None)
        self.free(segments)

    def free(self, segments: Iterable[int]) -> None:
        """Free those of these segments that are sealed and hold nothing."""
        by_unit: dict[int, list[int]] = {}
        for segment in segments:
            entry = self._table.get(segment)
            if entry is not None and not entry.spare and entry.writer is None and segment not in self._use:
                self._forget(segment)
                by_unit.setdefault(unit_of(segment), []).append(segment)
                if not entry.spilled and entry.segment.nbytes != self.units[unit_of(segment)].segment_bytes:
                    self._pooled[entry.segment.nbytes].append(unit_of(segment))
        for number, freed in by_unit.items():
            self._push_free(self.units[number], freed)

    def being_written(self) -> Iterable[Entry]:
        """The segments that have a writer, the one to which nobody has written for longest first."""
        return self._open.values()

    # --- survivors --------------------------------------------------------------------------------------------

    def take_sealed(self) -> set[int]:
        """Segments that were sealed since the last call; some may be gone again."""
        sealed, self._sealed = self._sealed, set()
        return sealed

    def sealed_bytes(self, segment: int) -> int:
        """The size of a sealed segment; 0 for any other."""
        entry = self._table.get(segment)
        return entry.segment.nbytes if entry is not None and not entry.spare and entry.writer is None else 0

    def is_spilled(self, segment: int) -> bool:
        entry = self._table.get(segment)
        return entry is not None and entry.spilled

    def adopt(self, segment: Segment, *, spilled: bool) -> None:
        """A unit has copied survivors to this new segment. Raises Invalid for one that is known."""
        if segment.segment in self._table or segment.segment in self._use or segment.unit not in self.units:
            raise Invalid(f"segment {segment.segment:016x} is no new one")
        self._add_sealed(segment, spilled=spilled)

    def spilled(self, client: str, m: Spilled, now: float) -> None:
        """The answer to SpillSegments. Raises Invalid if there was no question."""
        unit = self.units.get(m.unit)
        if unit is None or unit.client != client or not unit.spilling:
            raise Invalid(f"unit {m.unit} was not asked to move segments to disk")
        self._spilling.done(unit, m, now)
        self.changed = True

    def _add_sealed(self, segment: Segment, *, spilled: bool) -> None:
        entry = self._table[segment.segment] = Entry(segment, spare=False, spilled=spilled)
        self.units[segment.unit].add_sealed(entry)
        self._sealed.add(segment.segment)

    # --- supply -----------------------------------------------------------------------------------------------

    def plan(self, demands: list[int], now: float, *, durable: Sequence[int] = ()) -> tuple[int, int]:
        """Ask units for what `demands` (bytes of the requests that wait; `durable`: for such segments) and the spare
        segments need, in budget. What is missing for the demands beyond what will come: bytes in memory, on disk."""
        self.changed = False
        for unit in self._alive():
            if unit.spill_retry_at is not None and unit.spill_retry_at <= now:
                unit.spill_retry_at = None
        units = [unit for unit in self._alive() if unit.retry_at is None or unit.retry_at <= now]
        usual = max((unit.segment_bytes for unit in self._alive()), default=0)
        disk = self._plan_durable(sorted(durable))
        memory = self._plan_large(sorted(nbytes for nbytes in demands if nbytes > usual))
        waiting = sum(nbytes <= usual for nbytes in demands)
        for unit in units:
            unit.retry_at = None
            share = -(-waiting // len(units))
            wanted = self._spare_segments + share - unit.made_or_making()
            count = min(wanted, unit.room() // unit.segment_bytes)
            if count > 0:
                self._ask(unit, count, unit.segment_bytes)
            if count < wanted:
                self._spilling.ask(unit, (wanted - max(0, count)) * unit.segment_bytes - unit.room())
        coming = sum(unit.made_or_making() * usual + sum(unit.spilling.values()) for unit in self._alive())
        return memory + max(0, waiting * usual - coming), disk

    def next_retry(self) -> float | None:
        """When `plan` should be called again because a unit could not make segments, or move them to disk."""
        times = (time for unit in self._alive() for time in (unit.retry_at, unit.spill_retry_at))
        return min((time for time in times if time is not None), default=None)

    def check_unit(self, client: str, m: RegisterUnit) -> None:
        """Raises Invalid for a unit that another living client serves, or a number that is none."""
        if not 0 <= m.info.unit < MAX_UNITS:
            raise Invalid(f"unit {m.info.unit}; units are numbered from 0 to {MAX_UNITS - 1}")
        known = self.units.get(m.info.unit)
        if known is not None and known.client not in (None, client):
            raise Invalid(
                f"unit {m.info.unit} is served by another process, in {known.info.directory}; end that one first, or "
                "give this one another number"
            )

    def errors(self) -> dict[int, str]:
        """Why units could not make segments when they were asked last."""
        return {number: unit.error for number, unit in sorted(self.units.items()) if unit.error}

    def spill_errors(self) -> dict[int, str]:
        """Why units could not move segments to disk when they were asked last."""
        return {number: unit.spill_error for number, unit in sorted(self.units.items()) if unit.spill_error}

    def smallest(self) -> int:
        """Bytes that any segment of the usual size has: who asks for fewer gets the same as who asks for so many."""
        return min((unit.segment_bytes for unit in self._alive()), default=0)

    def largest_budget(self, *, durable: bool = False) -> int:
        return max((unit.spill_budget if durable else unit.budget for unit in self.units.values()), default=0)

    def stats(self) -> list[UnitStats]:
        count: dict[int, int] = dict.fromkeys(self.units, 0)
        for segment in self._table:
            count[unit_of(segment)] += 1
        return [unit.stats(count[number]) for number, unit in sorted(self.units.items())]

    def _plan_large(self, demands: list[int]) -> int:
        """One large segment per demand; those made for nobody any more are freed. The bytes that are missing."""
        making = ((unit, nbytes, durable) for unit in self._alive() for _, nbytes, durable in unit.making)
        coming = [nbytes for unit, nbytes, durable in making if nbytes != unit.segment_bytes and not durable]
        idle = [(segment, unit) for unit in self._alive() for segment in unit.large]
        missing = 0
        for nbytes in _unserved(demands, idle, coming):
            least = whole_pages(nbytes)
            if not (self._ask_large(size_class(nbytes)) or self._ask_large(least) or self._spill_for(least)):
                missing += least
        for segment, unit in idle:
            unit.large.remove(segment)
            self._free_idle(unit, segment)
        return missing

    def _plan_durable(self, demands: list[int]) -> int:
        """The same on disk, where none is kept ready: of the usual size, or as large as it has to be."""
        coming = [n for unit in self._alive() for _, n, durable in unit.making if durable]
        idle = [(segment, unit) for unit in self._alive() for segment in unit.durable]
        missing = 0
        for nbytes in _unserved(demands, idle, coming):
            for unit in self._by_turns():
                size = max(unit.segment_bytes, whole_pages(nbytes))
                if unit.spill_retry_at is None and unit.disk_room() >= size:
                    self._turn = unit.info.unit + 1
                    self._ask(unit, 1, size, durable=True)
                    break
            else:
                missing += max(self.smallest(), whole_pages(nbytes))
        for segment, unit in idle:
            unit.durable.remove(segment)
            self._free_idle(unit, segment)
        return missing

    def _free_idle(self, unit: Unit, segment: Segment) -> None:
        """It was made for somebody who does not wait any more."""
        self._forget(segment.segment)
        self._push_free(unit, [segment.segment])

    def _ask_large(self, nbytes: int) -> bool:
        """Ask the first unit, by turns, that has room, but first one that may have pooled such a segment; or one that
        has room when it frees its spare segments."""
        pooled = self._pooled[nbytes]
        for unit in sorted(self._by_turns(), key=lambda unit: unit.info.unit not in pooled):
            if unit.retry_at is None and unit.room() >= nbytes:
                if unit.info.unit in pooled:
                    pooled.remove(unit.info.unit)
                self._ask(unit, 1, nbytes)
                return True
        for unit in self._by_turns():
            if unit.retry_at is None and unit.room() + len(unit.spares) * unit.segment_bytes >= nbytes:
                freed: list[int] = []
                while unit.room() < nbytes:
                    freed.append(unit.spares.pop().segment)
                    self._forget(freed[-1])
                self._push_free(unit, freed)
                self._ask(unit, 1, nbytes)
                return True
        return False

    def _spill_for(self, nbytes: int) -> bool:
        """Make room for a large segment in the first unit, by turns, that can; whether there was one."""
        for unit in self._by_turns():
            missing = nbytes - unit.room() - len(unit.spares) * unit.segment_bytes
            if unit.budget >= nbytes and self._spilling.ask(unit, missing):
                return True
        return False

    def _ask(self, unit: Unit, count: int, nbytes: int, *, durable: bool = False) -> None:
        assert unit.client is not None
        unit.making.append((count, nbytes, durable))
        self._push(unit.client, MakeSegments(count=count, nbytes=nbytes, durable=durable))

    def _give(self, client: str, unit: Unit, segment: Segment) -> Segment:
        entry = self._table[segment.segment]
        entry.writer, entry.spare = client, False
        self._written.setdefault(client, set()).add(segment.segment)
        self._open[segment.segment] = entry
        self._turn = unit.info.unit + 1
        self.changed = True
        return segment

    def _push_free(self, unit: Unit, segments: list[int]) -> None:
        """A unit that is gone learns it when it registers again: what it is not to keep, it unlinks."""
        unit.retry_at = None
        self.changed = True
        if unit.client is not None and segments:
            self._push(unit.client, FreeSegments(segments=segments))

    def _forget(self, segment: int) -> None:
        entry = self._table.pop(segment)
        self.units[entry.segment.unit].remove(entry)
        if entry.writer is not None:
            del self._open[segment]
            mine = self._written[entry.writer]
            mine.remove(segment)
            if not mine:
                del self._written[entry.writer]

    def _alive(self) -> Iterator[Unit]:
        return (unit for unit in self.units.values() if unit.client is not None)

    def _by_turns(self) -> list[Unit]:
        """The living units, beginning with the one after the last that gave a segment."""
        return sorted(self._alive(), key=lambda unit: (unit.info.unit < self._turn, unit.info.unit))


def _unserved(demands: list[int], idle: list[tuple[Segment, Unit]], coming: list[int]) -> list[int]:
    """Those of the demands (bytes, ascending) for which nothing is idle or coming; `idle` is left with the rest."""
    idle.sort(key=lambda found: (found[0].nbytes, found[0].segment))
    coming.sort()
    unserved = []
    for nbytes in demands:
        if at := [i for i, (segment, _) in enumerate(idle) if segment.nbytes >= nbytes]:
            idle.pop(at[0])
        elif at := [i for i, size in enumerate(coming) if size >= nbytes]:
            coming.pop(at[0])
        else:
            unserved.append(nbytes)
    return unserved
