"""Which segments go to disk and when, as a state machine: nothing is written here."""

from __future__ import annotations

from collections import deque

import pytest

from transfer_queue.controller import spilling
from transfer_queue.controller.grants import SegmentGrants
from transfer_queue.errors import Invalid
from transfer_queue.ledger.blocks import PutTable, Segments, SegmentUse
from transfer_queue.ledger.fieldsets import FieldSets
from transfer_queue.net import messages as m
from transfer_queue.storage.segments import segment_id

SIZE = 1 << 16


class World:
    """One unit with room for eight segments in memory and some on disk, that makes what it is asked for."""

    def __init__(self, *, disk: int = 100, budget: int = 8) -> None:
        self.use: dict[int, SegmentUse] = {}
        self.pushes: deque = deque()
        self.grants = SegmentGrants(
            lambda _, push: self.pushes.append(push), use=self.use, segment_bytes=SIZE, spare_segments=1
        )
        self.made = 0
        self.table = PutTable(FieldSets(), Segments())
        info = m.UnitInfo(0, "/u", "", "n", "/disk")
        self.grants.register("unit", m.RegisterUnit(info, SIZE, budget * SIZE, [], [], disk * SIZE))
        self.plan()

    def plan(self, waiting: int = 0, now: float = 0.0) -> None:
        self.grants.plan([SIZE] * waiting, now)
        self.make(now)

    def make(self, now: float = 0.0) -> None:
        while self.pushes and not isinstance(self.pushes[0], m.SpillSegments):
            push, made = self.pushes.popleft(), []
            if isinstance(push, m.FreeSegments):
                continue
            for _ in range(push.count):
                self.made += 1
                made.append(m.Segment(segment_id(0, 1, self.made), 0, push.nbytes))
            self.grants.made("unit", m.SegmentsMade(0, made), now)

    def fill(self, count: int, *, table: PutTable | None = None) -> list[int]:
        """So many sealed segments in which something lives."""
        done = []
        for _ in range(count):
            segment = self.grants.grant("writer", SIZE)
            assert segment is not None
            self.use[segment.segment] = SegmentUse(SIZE, SIZE, 1, SIZE - 64, {table or self.table: {0}})
            self.grants.seal("writer", [segment.segment])
            self.plan()
            done.append(segment.segment)
        return done

    def spilling(self) -> list[int]:
        """What the unit was asked to move to disk, if it was."""
        assert len(self.pushes) <= 1
        return [segment for segment, _ in self.pushes[0].segments] if self.pushes else []

    def spilled(self, segments: list[int], error: str = "", now: float = 0.0) -> None:
        self.pushes.clear()
        self.grants.spilled("unit", m.Spilled(0, segments, error), now)
        self.plan(now=now)

    def bytes(self) -> tuple[int, int]:
        stats = self.grants.stats()[0]
        return stats.used // SIZE, stats.spilled // SIZE


def test_the_oldest_segments_go_to_disk_when_there_is_no_room_for_spare_ones():
    world = World()
    segments = world.fill(7)
    assert world.spilling() == []
    segments += world.fill(1)
    assert world.spilling() == segments[:1]
    assert world.pushes[0].segments[0][1] == SIZE - 64
    world.spilled(segments[:1])
    assert world.bytes() == (8, 1)
    assert world.grants.is_spilled(segments[0])


def test_a_unit_is_asked_once_and_for_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(spilling, "MAX_BYTES", 8 * SIZE)
    world = World(budget=30)
    segments = world.fill(30)
    world.plan(waiting=25)
    world.plan(waiting=25)
    assert world.spilling() == segments[:1]  # asked when the last spare segment was granted
    world.spilled(segments[:1])
    world.plan(waiting=25)
    assert world.spilling() == segments[1:9]


def test_what_is_full_on_disk_or_to_stay_in_memory_is_not_moved():
    world = World(disk=0)
    world.fill(8)
    world.plan(waiting=3)
    assert world.spilling() == []
    world = World()
    stays = PutTable(FieldSets(), Segments())
    stays.durability = "memory"
    world.fill(3, table=stays)
    segments = world.fill(5)
    assert world.spilling() == segments[:1]


def test_a_segment_that_is_freed_while_it_is_copied_is_counted_nowhere():
    world = World()
    (first, *_) = world.fill(8)
    assert world.spilling() == [first]
    del world.use[first]
    world.grants.free([first])
    assert world.pushes.pop() == m.FreeSegments([first])
    world.spilled([first])
    assert world.bytes() == (8, 0)  # seven, and a spare one


def test_after_an_error_a_unit_is_left_alone_for_a_while():
    world = World()
    segments = world.fill(8)
    world.spilled([], "/disk: No space left on device")
    assert world.spilling() == []
    assert world.grants.spill_errors() == {0: "/disk: No space left on device"}
    assert world.grants.next_retry() == spilling.PAUSE
    world.plan(now=spilling.PAUSE)
    assert world.spilling() == segments[:1]
    assert world.grants.next_retry() is None


def test_a_large_demand_makes_room_by_the_disk():
    world = World()
    segments = world.fill(6)
    world.grants.plan([4 * SIZE], 0.0)
    world.make()
    assert world.spilling() == segments[:2]
    world.spilled(segments[:2])
    world.grants.plan([4 * SIZE], 0.0)
    world.make()
    assert world.grants.grant("writer", 4 * SIZE) is not None


@pytest.mark.parametrize("client", ["unit", "other"])
def test_an_answer_that_nobody_asked_for_is_refused(client):
    world = World()
    with pytest.raises(Invalid, match="not asked"):
        world.grants.spilled(client, m.Spilled(0, [1]), 0.0)


def test_a_unit_that_comes_again_has_what_it_had_on_disk():
    world = World()
    segments = world.fill(8)
    world.spilled(segments[:1])
    info = m.UnitInfo(0, "/u", "", "n", "/disk")
    memory, disk = [(s, SIZE) for s in segments[1:]], [(segments[0], SIZE)]
    body = m.RegisterUnit(info, SIZE, 8 * SIZE, memory, [*disk, (77, SIZE)], 9 * SIZE)
    assert world.grants.missing(body) == []
    assert sorted(world.grants.register("unit", body)) == segments
    assert world.bytes() == (7, 1)
    assert world.grants.missing(m.RegisterUnit(info, SIZE, 8 * SIZE, memory)) == segments[:1]
