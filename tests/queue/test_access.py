"""How a client gets at the bytes of units: what it has not heard of is gone, not an accident."""

from __future__ import annotations

import numpy as np
import pytest

from transfer_queue.clients.access import UnitAccess
from transfer_queue.clients.reading import read_columns
from transfer_queue.errors import SegmentGone
from transfer_queue.net.messages import Block, FieldPlace, Located, Segment, UnitInfo
from transfer_queue.storage.arena import WriteArena
from transfer_queue.storage.columns import Column
from transfer_queue.storage.memory import ResultPool
from transfer_queue.storage.segments import segment_id


def test_a_segment_of_a_unit_that_nobody_knows_any_more_is_given_back() -> None:
    """Granted by a controller that died before the client could ask where the unit is."""
    access = UnitAccess("c", "0" * 64)
    with pytest.raises(SegmentGone, match="storage unit 0 has not registered"):
        access.open_for_write(Segment(7, 0, 1 << 16))
    arena = WriteArena(access.open_for_write)
    arena.add([Segment(7, 0, 1 << 16)])
    assert arena.room() == 0
    assert arena.sealed() == [7]


def test_where_a_unit_is_is_asked_again_once_it_was_started_anew() -> None:
    access = UnitAccess("c", "0" * 64)
    access.learn([UnitInfo(3, "/nowhere", "ipc:///nowhere", "n", incarnation=7)])
    assert access.knows(segment_id(3, 7, 0))
    assert not access.knows(segment_id(3, 8, 0))
    assert not access.knows(segment_id(4, 7, 0))


class Reused:
    """A segment that was freed and written to by others after it was looked up."""

    results = ResultPool()

    async def fetch(self, blocks: list[Block], rows: list[int]) -> list[memoryview]:
        return [memoryview(b"\xff" * block.nbytes) for block in blocks]

    async def view(self, blocks: list[Block]) -> list[memoryview]:
        return []

    def check(self, blocks: list[Block]) -> None:
        raise SegmentGone("it was freed during the read")


async def test_bytes_of_a_reused_segment_are_read_again_and_not_called_damaged() -> None:
    column = Column.ragged([[1, 2], [3]])
    block = Block("x", 7, 0, column.nbytes, 2, "ragged", column.dtype, (), 0)
    places = [FieldPlace("x", np.zeros(2, "<i4").tobytes(), np.arange(2, dtype="<i4").tobytes())]
    with pytest.raises(SegmentGone):
        await read_columns(Reused(), Located(["a", "b"], [{}, {}], [block], places), copy=True)  # pyright: ignore
