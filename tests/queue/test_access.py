"""How a client gets at the bytes of units: what it has not heard of is gone, not an accident."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from transfer_queue.clients.access import UnitAccess
from transfer_queue.clients.reading import read_columns
from transfer_queue.errors import SegmentGone
from transfer_queue.net.messages import Block, FieldPlace, Located, Segment, UnitInfo
from transfer_queue.storage.arena import Extent, WriteArena, fill
from transfer_queue.storage.columns import Column
from transfer_queue.storage.memory import ResultPool
from transfer_queue.storage.segments import segment_id
from transfer_queue.storage.unit_files import UnitFiles


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


async def test_a_read_that_waits_for_a_unit_that_was_started_anew_is_to_be_looked_up_again(tmp_path) -> None:
    access = UnitAccess("c", "0" * 64, force_remote=True)
    access.learn([UnitInfo(3, "/nowhere", f"ipc://{tmp_path}/old", "n", incarnation=7)])
    block = Block("x", segment_id(3, 7, 0), 0, 8, 1, "dense", "<i8", (), 0)
    reading = asyncio.ensure_future(access.fetch([block], [1]))
    await asyncio.sleep(0.05)
    access.learn([UnitInfo(3, "/nowhere", f"ipc://{tmp_path}/new", "m", incarnation=8)])
    with pytest.raises(SegmentGone, match="unit 3 was started anew"):
        await asyncio.wait_for(reading, 1.5)
    access.close()


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


@pytest.mark.parametrize("segments", [1, 30])
async def test_rows_whose_memory_others_have_got_are_read_from_the_disk(tmp_path: Path, segments: int) -> None:
    disk = f"{tmp_path}/disk"
    files = UnitFiles(tmp_path / "unit", 0, budget=1 << 24, spill=disk)
    access = UnitAccess("c", "0" * 64, force_remote=False)
    access.learn([UnitInfo(0, f"{tmp_path}/unit", "", files.nonce, spill=disk, incarnation=files.incarnation)])
    column = Column.objects([{"row": row} for row in range(8)])
    blocks, made = [], files.make(segments, 1 << 16)
    for segment in made:
        memory = files.writable(segment)[: column.nbytes]
        blocks.append(fill(Extent(segment.segment, 0, column.nbytes, memory), "o", column))
    number = np.arange(segments, dtype="<i4")
    place = FieldPlace("o", number.tobytes(), (number % 8).tobytes())
    located = Located([f"{n}" for n in number], [{}] * segments, blocks, [place])
    want = [{"row": n % 8} for n in range(segments)]
    assert (await read_columns(access, located, copy=True))[0]["o"].rows_list() == want
    for segment in made:
        assert files.spill(segment.segment, column.nbytes)
    for other in files.make(segments, 1 << 16):
        files.writable(other)[:] = 0xFF
    with pytest.raises(SegmentGone):  # once, and not once for each segment
        await read_columns(access, located, copy=True)
    assert (await read_columns(access, located, copy=True))[0]["o"].rows_list() == want
    access.close()
    files.close()
