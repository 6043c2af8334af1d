"""A checkpoint that is written while the ranks train on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.config.sections.actor import CheckpointConfig
from streamrl.runtime.failures import DiskFullError, explained
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup, WorkerFailed
from streamrl.workers.actor import HUGGINGFACE, ActorWorker
from tests.workers.tiny import make_model, make_rows, settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB: less than the checkpoint takes."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "none", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield place
    subprocess.run(["umount", place], check=True)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


async def test_it_holds_what_was_there_when_it_was_asked_for(model: str, tmp_path: Path) -> None:
    batch, store = make_rows(4, 2)
    chosen = settings(model, lr=1e-2, checkpoint=CheckpointConfig(save_contents=("model", "hf_model")))
    group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, chosen, store))
    await group.init_model()
    for round_ in ("first", "second"):
        await group.update_actor(batch)
        at_once, beside = tmp_path / round_ / "at_once", tmp_path / round_ / "beside"
        await group.save_checkpoint(str(at_once))
        before = await group.state_digest()
        await group.save_checkpoint(str(beside), background=True)
        await group.update_actor(batch)
        assert await group.state_digest() != before
        await group.checkpoint_written()
        assert contents(beside) == contents(at_once)
        assert f"{HUGGINGFACE}/model.safetensors" in contents(beside)
    await group.load_checkpoint(str(tmp_path / "second" / "beside"))
    assert await group.state_digest() == before
    await group.close()


async def test_a_full_disk_is_told_and_the_training_goes_on(model: str, small_disk: Path, tmp_path: Path) -> None:
    batch, store = make_rows(4, 2)
    group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, settings(model), store))
    await group.init_model()
    await group.update_actor(batch)
    for directory in (small_disk / "again", small_disk / "c"):
        await group.save_checkpoint(str(directory), background=True)
        with pytest.raises(WorkerFailed, match=r"safetensors cannot be written: .*No space left on device") as caught:
            await group.checkpoint_written()
    assert isinstance(explained(caught.value, tmp_path), DiskFullError)
    await group.update_actor(batch)
    await group.save_checkpoint(str(tmp_path / "c"), background=True)
    await group.checkpoint_written()
    await group.load_checkpoint(str(tmp_path / "c"))
    await group.close()
