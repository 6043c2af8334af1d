from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from streamrl.trainer.checkpoint import CheckpointError, CheckpointStore, TrainerState


async def save_shard(directory: Path) -> None:
    (directory / "actor").mkdir()
    (directory / "actor" / "shard.bin").write_bytes(b"weights")


async def save_nothing(directory: Path) -> None:
    raise OSError(28, "No space left on device")


async def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    state = TrainerState(4, 130, [96, 97], {"before": {"sampled": 0.25, "greedy": 0.5}})
    assert await store.save(state, save_shard) == 4
    assert store.steps() == [4]
    assert store.load(4) == state


@pytest.mark.parametrize(("keep", "left", "removed"), [(1, [6], [4]), (2, [4, 6], [2]), (None, [2, 4, 6], [])])
async def test_as_many_checkpoints_stay_as_are_asked_for_and_the_newest_makes_acks_final(
    tmp_path: Path, keep: int | None, left: list[int], removed: list[int]
) -> None:
    store = CheckpointStore(tmp_path, keep=keep)
    assert [await store.save(TrainerState(step, 0), save_shard) for step in (2, 4, 6)] == [2, 4, 6]
    assert store.steps() == left
    assert store.removed == removed


async def test_every_nth_checkpoint_stays_beside_the_last_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_every=4)
    for step in (2, 4, 6, 8, 10, 11):
        await store.save(TrainerState(step, 0), save_shard)
    assert store.steps() == [4, 8, 11]
    assert store.removed == [10]


async def test_what_was_kept_for_good_stays_when_the_run_goes_on_without_the_interval(tmp_path: Path) -> None:
    for keep_every, steps in ((4, (2, 4, 6)), (None, (8, 10)), (5, (12, 15, 16)), (None, (17,))):
        store = CheckpointStore(tmp_path, keep=1, keep_every=keep_every)
        for step in steps:
            await store.save(TrainerState(step, 0), save_shard)
    assert store.steps() == [4, 15, 17]


async def test_what_killed_processes_left_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    await store.save(TrainerState(2, 0), save_shard)
    for name in (".global_step_4.draft", ".global_step_1.removed"):
        shutil.copytree(tmp_path / "global_step_2", tmp_path / name)
    assert store.steps() == [2]
    store.clean()
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_2"]  # noqa: ASYNC240


@pytest.mark.parametrize("size", [0, 10, 4096, 20_000])
async def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, size: int) -> None:
    """On any file of it: a file can grow to `size`, as on a full disk."""
    store = CheckpointStore(tmp_path)
    await store.save(TrainerState(2, 0), save_shard)

    async def save_much(directory: Path) -> None:
        (directory / "actor").mkdir()
        (directory / "actor" / "shard.bin").write_bytes(bytes(8192))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            await store.save(TrainerState(4, 0, outstanding=list(range(10_000))), save_much)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_2"]  # noqa: ASYNC240
    assert store.load(2).step == 2


async def test_a_failed_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    await store.save(TrainerState(2, 0), save_shard)
    with pytest.raises(OSError, match="No space"):
        await store.save(TrainerState(4, 0), save_nothing)
    assert store.steps() == [2]
    assert [path.name for path in tmp_path.glob("*")] == ["global_step_2"]  # noqa: ASYNC240


def a_link_in_its_place(file: Path) -> None:
    """To the very same bytes."""
    elsewhere = file.parent.parent.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: f.write_bytes(b"weightz"),
        lambda f: f.write_bytes(b"weight"),
        lambda f: f.write_bytes(b""),
        lambda f: f.unlink(),
    ],
    ids=["a flipped bit", "cut short", "empty", "missing"],
)
async def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, damage) -> None:
    store = CheckpointStore(tmp_path)
    await store.save(TrainerState(2, 0), save_shard)
    damage(tmp_path / "global_step_2" / "actor" / "shard.bin")
    with pytest.raises(CheckpointError, match=r"global_step_2 is damaged: actor/shard.bin"):
        store.load(2)


@pytest.mark.parametrize(
    ("place", "says"),
    [(a_link_in_its_place, "shard.bin is a link"), (lambda f: os.mkfifo(f"{f}.p"), "p is no plain file")],
)
async def test_a_checkpoint_with_anything_but_plain_files_is_refused(tmp_path: Path, place, says: str) -> None:
    store = CheckpointStore(tmp_path)
    await store.save(TrainerState(2, 0), save_shard)
    place(tmp_path / "global_step_2" / "actor" / "shard.bin")
    with pytest.raises(CheckpointError, match=f"global_step_2 cannot be read: .*{says}"):
        store.load(2)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("manifest.json", '{"format": 1, "step": 2, "files": {}}', "is damaged: actor/shard.bin is not in manifest"),
        ("manifest.json", '{"format": 1, "step": 2, "files": 3}', "cannot be read"),
        ("manifest.json", '{"format": 1, "step": 2, "files": {"actor/shard.bin": 3}}', "cannot be read"),
        ("manifest.json", '{"format": 1, "step": [], "files": {}}', "cannot be read"),
        ("manifest.json", "[]", "cannot be read"),
        ("manifest.json", "[" * 100_000, "cannot be read: RecursionError"),
        ("trainer.json", "[" * 100_000, "cannot be read: RecursionError"),
        ("trainer.json", "[]", "cannot be read"),
        ("trainer.json", '{"step": "2", "next_order": 0}', "cannot be read"),
        ("trainer.json", '{"step": 2, "next_order": 0, "outstanding": [null]}', "cannot be read"),
        ("actor/more.bin", "x", "is damaged: actor/more.bin is not in manifest.json"),
    ],
)
async def test_a_checkpoint_that_does_not_say_what_it_holds_is_refused(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    store = CheckpointStore(tmp_path)
    await store.save(TrainerState(2, 0), save_shard)
    (tmp_path / "global_step_2" / name).write_text(text)
    with pytest.raises(CheckpointError, match=says):
        store.load(2)


async def test_a_checkpoint_that_is_a_link_is_refused_and_as_an_older_one_it_goes_alone(tmp_path: Path) -> None:
    store, elsewhere = CheckpointStore(tmp_path / "checkpoints", keep=1), tmp_path / "elsewhere"
    await store.save(TrainerState(2, 0), save_shard)
    store.path(2).rename(elsewhere)
    store.path(2).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=f"global_step_2 is a link, to {elsewhere}: .*Move the directory itself"):
        store.load(2)
    await store.save(TrainerState(4, 0), save_shard)
    (store.directory / ".global_step_1.removed").symlink_to(tmp_path / "nothing")
    store.clean()
    assert [path.name for path in store.directory.iterdir()] == ["global_step_4"]
    assert (elsewhere / "manifest.json").exists(), "what a link names is not ours"


async def test_the_directory_of_checkpoints_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    for step in (2, 4):
        await store.save(TrainerState(step, 0), save_shard)
    assert store.load(4).step == 4
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["global_step_4"]
    (tmp_path / "disk").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="checkpoints is no directory, or a link to one that is not there"):
        store.steps()


async def test_a_renamed_checkpoint_says_which_it_is(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    await store.save(TrainerState(9, 0), save_shard)
    store.path(9).rename(store.path(999))
    with pytest.raises(CheckpointError, match="global_step_999 is that of step 9 by its own account: .*global_step_9 "):
        store.load(999)


async def test_a_directory_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "global_step_8").mkdir()
    assert CheckpointStore(tmp_path).steps() == []
