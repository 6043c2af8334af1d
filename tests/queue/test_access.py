"""How a client gets at the bytes of units: what it has not heard of is gone, not an accident."""

from __future__ import annotations

import pytest

from transfer_queue.access import UnitAccess
from transfer_queue.errors import SegmentGone
from transfer_queue.net.messages import Segment, UnitInfo
from transfer_queue.storage.arena import WriteArena
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
