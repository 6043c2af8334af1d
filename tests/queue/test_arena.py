"""Segments and arenas: where bytes go, and how a reader knows that they are still the ones committed."""

from __future__ import annotations

import itertools
import os
import stat
import weakref

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import Corrupt, Invalid, SegmentGone
from transfer_queue.net.messages import Block, Segment
from transfer_queue.storage.arena import MAX_BEGUN, Extent, ReadArena, WriteArena, fill
from transfer_queue.storage.columns import Column, read_block
from transfer_queue.storage.segments import (
    FileCache,
    make_file,
    map_segment,
    segment_file,
    segment_id,
    segment_of,
    unit_of,
)

SIZE = 4096


def make(directory, *segments: int, nbytes: int = SIZE) -> list[Segment]:
    for segment in segments:
        make_file(directory / segment_file(segment), nbytes)
    return [Segment(segment, unit_of(segment), nbytes) for segment in segments]


def writer(directory) -> WriteArena:
    return WriteArena(lambda s: map_segment(str(directory), s.segment, write=True).data)


def reader(directory) -> ReadArena:
    return ReadArena(lambda s: map_segment(str(directory), s))


def write_one(directory, values: np.ndarray, segment: int = 1) -> Block:
    arena = writer(directory)
    arena.add(make(directory, segment))
    column = Column.ragged([values])
    (extent,) = arena.place([column.nbytes])
    return fill(extent, "responses", column)


def test_a_segment_id_names_its_unit_and_its_file():
    segment = segment_id(5, 7, 9)
    assert unit_of(segment) == 5
    assert segment_of(segment_file(segment)) == segment
    assert segment_of("../../etc/passwd") is None
    assert segment_of("x" * 16 + ".seg") is None
    with pytest.raises(Invalid):
        segment_file(-1)


def test_a_segment_file_is_private_and_wholly_allocated(tmp_path):
    make(tmp_path, 1)
    info = os.stat(tmp_path / segment_file(1))
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_blocks * 512 >= SIZE


def test_a_segment_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"x" * 64)
    os.symlink(tmp_path / "secret", tmp_path / segment_file(1))
    with pytest.raises(Invalid, match="is a symbolic link"):
        map_segment(str(tmp_path), 1)


def test_what_is_placed_and_filled_reads_back(tmp_path):
    block = write_one(tmp_path, np.arange(10))
    data = reader(tmp_path).blocks([block], [1])[0]
    assert read_block(block, data)[0].tolist() == list(range(10))
    assert data.readonly


def test_extents_are_aligned_and_never_overlap(tmp_path):
    arena = writer(tmp_path)
    arena.add(make(tmp_path, 1, 2))
    places = [extent for sizes in ([100, 1, 700], [3000], [500]) for extent in arena.place(sizes)]
    spans = sorted((e.segment, e.offset, e.offset + len(e.data)) for e in places)
    assert all(offset % 64 == 0 for _, offset, _ in spans)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))


def test_a_put_that_does_not_fit_allocates_nothing_and_says_what_is_missing(tmp_path):
    arena = writer(tmp_path)
    arena.add(make(tmp_path, 1))
    assert arena.place([1000, SIZE]) == 1024 + SIZE
    assert arena.room() == SIZE


def test_a_finished_segment_is_sealed_only_when_nothing_of_it_is_being_written(tmp_path):
    arena = writer(tmp_path)
    arena.add(make(tmp_path, 1, 2))
    half = arena.place([SIZE // 2])
    rest = arena.place([SIZE // 2])
    assert arena.sealed() == []
    arena.settle(half)
    assert arena.sealed() == []
    arena.settle(rest)
    assert arena.sealed() == [1]
    assert arena.sealed() == []


def test_the_commit_of_the_last_blocks_of_a_segment_seals_it(tmp_path):
    """Else a large segment would be held until the writer's next put."""
    arena = writer(tmp_path)
    arena.add(make(tmp_path, 1))
    column = Column.dense(np.zeros(SIZE, np.uint8))
    extents = arena.place([column.nbytes])
    assert arena.sealed() == []
    assert arena.sealed([fill(extents[0], "f", column)]) == [1]
    arena.settle(extents)
    assert arena.sealed() == []


def test_more_than_a_few_begun_segments_are_finished_the_fullest_first(tmp_path):
    arena = writer(tmp_path)
    arena.add(make(tmp_path, *range(1, MAX_BEGUN + 2)))
    for left in range(MAX_BEGUN + 1):
        arena.settle(arena.place([SIZE // 2 + 1, 64 * left]))
    assert arena.sealed() == [MAX_BEGUN + 1]


def test_a_put_that_fills_no_segment_alone_is_spread_over_those_with_room(tmp_path):
    arena = writer(tmp_path)
    arena.add(make(tmp_path, 1, 2))
    assert [e.segment for e in arena.place([SIZE // 2, SIZE // 2 + 64, SIZE // 4])] == [1, 2, 1]


@pytest.mark.parametrize("nbytes", [1, 1000, 3 << 20])
@pytest.mark.parametrize("kind", ["dense", "ragged", "object"])
def test_a_block_is_the_same_written_to_memory_and_through_its_file(tmp_path, kind, nbytes):
    values = np.random.default_rng(nbytes).integers(0, 255, nbytes, dtype=np.uint8)
    columns = {
        "dense": Column.dense(values),
        "ragged": Column.ragged([values[:1], values]),
        "object": Column.objects([values.tobytes(), None]),
    }
    column = columns[kind]
    make(tmp_path, 1, 2, nbytes=column.nbytes + 64)
    mapping = map_segment(str(tmp_path), 1, write=True)
    other = map_segment(str(tmp_path), 2, write=True)
    a = fill(Extent(1, 64, column.nbytes, mapping.data[64:]), "f", column)
    b = fill(Extent(2, 64, column.nbytes, None, other.file), "f", column)
    assert a.digest == b.digest
    assert reader(tmp_path).blocks([a], [1])[0].tobytes() == reader(tmp_path).blocks([b], [1])[0].tobytes()


def test_a_file_that_comes_again_under_another_id_is_not_mapped_again(tmp_path):
    files = FileCache(write=False)
    make(tmp_path, 1)
    old, known = files.open(str(tmp_path), 1)
    assert not known
    os.rename(tmp_path / segment_file(1), tmp_path / segment_file(2))
    new, known = files.open(str(tmp_path), 2)
    assert known
    assert np.shares_memory(new.data, old.data)
    assert new.stands()
    assert not old.stands()


def test_a_file_without_a_name_is_let_go(tmp_path):
    files = FileCache(write=True)
    make(tmp_path, 1)
    file = weakref.ref(files.open(str(tmp_path), 1)[0].file)
    before = len(os.listdir("/proc/self/fd"))
    os.unlink(tmp_path / segment_file(1))
    files.sweep()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert file() is None


def test_a_private_view_keeps_what_is_written_to_it_to_itself(tmp_path):
    make(tmp_path, 1)
    mapping = map_segment(str(tmp_path), 1)
    view = mapping.file.private_view()
    view[:] = 7
    assert not mapping.data.any()


@given(st.lists(st.lists(st.integers(1, SIZE), min_size=1, max_size=4), max_size=30))
def test_a_writer_never_holds_more_than_a_few_segments_whatever_it_puts(puts):
    arena = WriteArena(lambda segment: np.zeros(segment.nbytes, np.uint8))
    held, number = set(), 0
    for sizes in puts:
        while isinstance(extents := arena.place(sizes), int):
            number += 1
            arena.add([Segment(number, 0, max(SIZE, extents))])
            held.add(number)
        arena.settle(extents)
        held -= set(arena.sealed())
    assert len(held) <= MAX_BEGUN + 4


def test_a_grant_whose_file_is_gone_is_given_back(tmp_path):
    arena = writer(tmp_path)
    arena.add([Segment(3, 0, SIZE)])
    assert arena.room() == 0
    assert arena.sealed() == [3]


def test_all_segments_of_a_unit_that_lost_one_are_given_up(tmp_path):
    arena = writer(tmp_path)
    other = segment_id(1, 0, 0)
    arena.add(make(tmp_path, 1, 2, other))
    extents = arena.place([100])
    arena.give_up({0})
    assert arena.room() == SIZE
    assert arena.sealed() == [2]
    arena.settle(extents)
    assert arena.sealed() == [1]


def test_a_flipped_bit_is_corrupt(tmp_path):
    block = write_one(tmp_path, np.arange(10))
    map_segment(str(tmp_path), 1, write=True).data[block.offset + 70] ^= 1
    with pytest.raises(Corrupt, match="digest"):
        reader(tmp_path).blocks([block], [1])[0]


def test_a_block_outside_its_segment_is_corrupt(tmp_path):
    block = write_one(tmp_path, np.arange(10))
    beyond = Block(
        "f", 1, SIZE - 64, 128, *tuple(getattr(block, f) for f in ("rows", "kind", "dtype", "shape", "digest"))
    )
    with pytest.raises(Corrupt, match="outside segment"):
        reader(tmp_path).blocks([beyond], [1])[0]


def test_a_segment_reused_under_a_new_id_during_a_read_is_noticed(tmp_path):
    block = write_one(tmp_path, np.arange(10))
    arena = reader(tmp_path)
    arena.blocks([block], [1])
    arena.check([block])
    os.rename(tmp_path / segment_file(1), tmp_path / segment_file(2))
    with pytest.raises(SegmentGone, match="freed during the read"):
        arena.check([block])


def test_all_segments_that_are_gone_are_noticed_and_let_go_at_once(tmp_path):
    blocks = [write_one(tmp_path, np.arange(10), segment) for segment in range(1, 30)]
    arena = reader(tmp_path)
    arena.blocks(blocks, [1] * len(blocks))
    for block in blocks[1:]:
        os.rename(tmp_path / segment_file(block.segment), tmp_path / segment_file(100 + block.segment))
    with pytest.raises(SegmentGone, match="28 segments"):
        arena.check(blocks)
    for block in blocks[1:]:
        os.rename(tmp_path / segment_file(100 + block.segment), tmp_path / segment_file(block.segment))
    arena.blocks(blocks, [1] * len(blocks))
    arena.check(blocks)


def test_a_block_beyond_the_end_of_a_file_that_is_another_one_by_now_is_gone_and_not_corrupt(tmp_path):
    block = write_one(tmp_path, np.arange(10))
    arena = reader(tmp_path)
    arena.blocks([block], [1])
    os.rename(tmp_path / segment_file(1), tmp_path / segment_file(2))
    make(tmp_path, 1, nbytes=4 * SIZE)
    beyond = msgspec.structs.replace(block, offset=2 * SIZE)
    with pytest.raises(SegmentGone, match="freed during the read"):
        arena.blocks([beyond], [1])


def test_a_sweep_lets_go_of_segments_that_are_gone(tmp_path):
    block = write_one(tmp_path, np.arange(10))
    arena = reader(tmp_path)
    arena.blocks([block], [1])
    os.unlink(tmp_path / segment_file(1))
    arena.sweep()
    with pytest.raises(SegmentGone):
        arena.blocks([block], [1])


@pytest.mark.parametrize("error", [FileExistsError])
def test_a_segment_is_never_made_over_an_existing_file(tmp_path, error):
    make(tmp_path, 1)
    with pytest.raises(error):
        make(tmp_path, 1)


def test_a_segment_that_others_need_is_written_no_further_and_owed_until_it_is_reported(tmp_path):
    arena = writer(tmp_path)
    arena.add(make(tmp_path, 1, 2))
    begun = arena.place([100])
    arena.recall([1, 77])
    assert not arena.owes()
    assert {extent.segment for extent in arena.place([100])} == {2}
    arena.settle(begun)
    assert arena.owes()
    assert arena.sealed() == [1]
    assert not arena.owes()
