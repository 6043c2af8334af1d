"""A storage unit's files: ids that never come twice, a pool that nobody can still be writing to, limits that hold."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from transfer_queue.errors import Invalid, SegmentGone
from transfer_queue.net.messages import Keep, MakeSegments, Ok, RegisterUnit, SegmentsMade
from transfer_queue.storage import unit_files
from transfer_queue.storage.leftovers import remove_leftovers
from transfer_queue.storage.place import choose_storage
from transfer_queue.storage.segments import map_segment, segment_file
from transfer_queue.storage.unit import Unit
from transfer_queue.storage.unit_files import UnitFiles

SIZE = 1 << 16


@pytest.fixture
def files(tmp_path):
    files = UnitFiles(tmp_path / "unit-3", 3, budget=16 * SIZE)
    yield files
    files.close()


def ids(segments) -> list[int]:
    return [segment.segment for segment in segments]


def names(files: UnitFiles, ending: str) -> list[str]:
    return sorted(name for name in os.listdir(files.directory) if name.endswith(ending))


def test_an_id_is_never_used_twice_even_after_restarts(tmp_path):
    seen: list[int] = []
    for _ in range(3):
        files = UnitFiles(tmp_path / "u", 0, budget=64 * SIZE)
        seen += ids(files.make(2, SIZE))
        files.free(seen[-2:])
        seen += ids(files.make(2, SIZE))
        files.close()
    assert len(set(seen)) == len(seen)


def test_an_id_is_not_used_again_after_its_directory_was_lost(tmp_path):
    """A reader that was told where rows lay before must not take others for them, damaged."""
    seen: list[int] = []
    for _ in range(3):
        files = UnitFiles(tmp_path / "u", 0, budget=64 * SIZE)
        seen += ids(files.make(2, SIZE))
        files.close(remove=True)
    assert len(set(seen)) == len(seen)


def test_a_freed_segment_comes_back_under_a_new_id_and_the_old_one_is_gone(files):
    (old,) = files.make(1, SIZE)
    mapping = map_segment(str(files.directory), old.segment)
    files.free([old.segment])
    (new,) = files.make(1, SIZE)
    assert map_segment(str(files.directory), new.segment).inode == mapping.inode
    assert not mapping.stands()
    with pytest.raises(SegmentGone):
        map_segment(str(files.directory), old.segment)


def test_a_segment_made_before_the_last_registration_is_unlinked_and_not_pooled(files):
    """Its writer may still hold the mapping: a restarted controller does not know its writers."""
    segments = ids(files.make(2, SIZE))
    files.keep(segments[:1])
    assert names(files, ".seg") == [segment_file(segments[0])]
    files.free(segments)
    assert names(files, ".seg") == names(files, ".pool") == []


def test_a_pinned_segment_is_unlinked_and_not_pooled_until_its_reader_is_killed(files):
    made = ids(files.make(2, SIZE))
    code = (
        "import sys; from transfer_queue.storage.segments import pin_segment;"
        "pins = [pin_segment(sys.argv[1], int(s)) for s in sys.argv[2:]]; print('pinned', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(files.directory), *map(str, made)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdout.readline() == "pinned\n"
    files.free(made[:1])
    assert names(files, ".pool") == []
    assert names(files, ".seg") == [segment_file(made[1])]
    reader.kill()
    reader.wait()
    reader.stdin.close()
    reader.stdout.close()
    files.free(made[1:])
    assert len(names(files, ".pool")) == 1


def test_the_pool_keeps_half_of_the_budget_and_gives_way_to_segments(files):
    files.free(ids(files.make(12, SIZE)))
    assert len(names(files, ".pool")) == 8
    files.make(1, 15 * SIZE)
    assert len(names(files, ".pool")) == 1


def test_what_a_restarted_unit_finds_is_its_inventory(tmp_path, files):
    made = files.make(2, SIZE)
    (files.directory / "notes.txt").write_text("not a segment")
    os.symlink("/etc/passwd", files.directory / segment_file(7))
    files.close()
    again = UnitFiles(files.directory, 3, budget=SIZE)
    assert again.inventory() == [(segment, SIZE) for segment in ids(made)]
    assert again.nonce == files.nonce


def test_bytes_go_in_and_out_only_within_a_segment_that_is_there(files):
    (segment,) = ids(files.make(1, SIZE))
    files.write(segment, 64, b"hello")
    assert files.read(segment, 64, 5) == b"hello"
    for offset, nbytes in ((-1, 5), (SIZE - 1, 2), (0, -1), (2**62, 1)):
        with pytest.raises(Invalid, match="outside segment"):
            files.read(segment, offset, nbytes)
    files.free([segment])
    for act in (lambda: files.read(segment, 0, 1), lambda: files.write(segment, 0, b"x")):
        with pytest.raises(SegmentGone):
            act()


def test_a_full_directory_is_an_error_and_leaves_nothing_half_made(files, monkeypatch):
    made = []

    def full(path, nbytes, touch):
        if made:
            raise OSError(28, "No space left on device")
        made.append(path)
        path.write_bytes(b"x")

    monkeypatch.setattr(unit_files, "make_file", full)
    with pytest.raises(OSError, match="No space"):
        files.make(2, SIZE)
    assert files.inventory() == []
    assert names(files, ".seg") == []


def test_a_directory_belongs_to_one_living_unit(tmp_path):
    code = f"""
import sys
from transfer_queue.storage.unit_files import UnitFiles
files = UnitFiles({str(tmp_path / "u")!r}, 0, budget=1)
sys.stdout.write("ready\\n"); sys.stdout.flush()
sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdin is not None
    holder.stdout.readline()
    with pytest.raises(Invalid, match=f"held by process {holder.pid}"):
        unit_files.lock_file(tmp_path / "u" / "lock", "storage unit 0", wait=0.1)
    holder.stdin.close()
    os.close(unit_files.lock_file(tmp_path / "u" / "lock", "storage unit 0", wait=5.0))
    holder.wait()


def test_leftovers_go_only_when_nobody_can_use_them_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr("transfer_queue.storage.leftovers._YOUNG", -1.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    owners = {"tq-resumable": tmp_path / "run", "tq-orphan": tmp_path / "gone", "tq-living": tmp_path / "gone"}
    for name, owner in owners.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        (tmp_path / name / "owner").write_text(str(owner))
    (tmp_path / "tq-local-1").mkdir()
    (tmp_path / "tq-local-1" / "lock").touch()
    lock = unit_files.lock_file(tmp_path / "tq-living" / "lock", "test")
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["run", "tq-living", "tq-resumable"]
    os.close(lock)


def test_storage_without_a_budget_takes_a_part_of_what_is_free(tmp_path):
    parent, budget = choose_storage(tmp_path, 2, None)
    assert parent == tmp_path
    assert 0 < budget <= 4 << 30


class RestartedController:
    """Granted what this unit made, died before its answer came, and knows nothing of it in its next life."""

    def __init__(self) -> None:
        self.refused: list[int] = []
        self.answered = asyncio.Event()

    async def request(self, body, **_):
        if isinstance(body, RegisterUnit):
            return Keep([segment for segment, _ in body.inventory if segment in self.refused])
        self.refused += ids(body.segments)
        self.answered.set()
        raise Invalid("unit 3 was not asked for segments; forget them")


async def test_segments_whose_report_a_restarted_controller_refuses_stay_until_it_says_what_lies_in_them(files):
    controller = RestartedController()
    unit = Unit(files, "", SIZE)
    working = asyncio.create_task(unit.work(controller))
    unit.push(MakeSegments(2, SIZE))
    await asyncio.wait_for(controller.answered.wait(), 5)
    await unit.register(controller)
    working.cancel()
    assert controller.refused == [segment for segment, _ in files.inventory()]
    assert len(names(files, ".seg")) == 2


class Restless:
    """A controller that orders segments before it has read the registration, and after."""

    def __init__(self) -> None:
        self.unit: Unit | None = None
        self.made: list[SegmentsMade] = []
        self.answered = asyncio.Event()

    async def request(self, body, **_):
        assert self.unit is not None
        if isinstance(body, RegisterUnit):
            self.unit.push(MakeSegments(3, SIZE, order=7))
            keep = Keep([], after=7)
            self.unit.push(MakeSegments(1, SIZE, order=8))
            return keep
        self.made.append(body)
        self.answered.set()
        return Ok()


async def test_orders_that_crossed_the_registration_are_void(files):
    """The controller has forgotten them, and would take their answers for those to later orders."""
    controller = Restless()
    unit = controller.unit = Unit(files, "", SIZE)
    working = asyncio.create_task(unit.work(controller))
    await unit.register(controller)
    await asyncio.wait_for(controller.answered.wait(), 5)
    working.cancel()
    assert [len(made.segments) for made in controller.made] == [1]
