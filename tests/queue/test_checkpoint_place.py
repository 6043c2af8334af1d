"""Where a checkpoint is put: at every moment the old one or the new one is there, and nothing else goes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer_queue import checkpoint
from transfer_queue.checkpoint import placing
from transfer_queue.client import QueueClient
from transfer_queue.errors import Invalid
from transfer_queue.local import LocalQueue


@pytest.fixture
async def client():
    async with LocalQueue() as queue:
        client = queue.client("mine")
        await client.put("p", ["k"], {"x": np.arange(1)})
        yield client


def step(directory: Path | str) -> int:
    return checkpoint.read_manifest(directory).metadata["step"]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


KILLED = """
import asyncio, os, sys
import numpy as np
from transfer_queue import checkpoint
from transfer_queue.checkpoint import placing
from transfer_queue.local import LocalQueue

directory, exchange, at = sys.argv[1], sys.argv[2] == "exchange", int(sys.argv[3])
if not exchange:
    placing._exchange = lambda *_: False
calls = 0


def dying(function):
    def call(*arguments, **kwargs):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), 9)
        return function(*arguments, **kwargs)
    return call


placing.shutil.rmtree, placing.os.rename, placing._exchange = map(
    dying, (placing.shutil.rmtree, placing.os.rename, placing._exchange)
)


async def main():
    async with LocalQueue() as queue:
        client = queue.client("mine")
        await client.put("p", ["k"], {"x": np.arange(1)})
        await checkpoint.save(client, directory, metadata={"step": 2})


asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("how", "at", "left"),
    [("exchange", 1, 1), ("exchange", 2, 2), ("rename", 2, 1), ("rename", 3, 2), ("rename", 4, 2)],
)
async def test_a_saver_that_is_killed_leaves_a_whole_checkpoint_and_the_next_one_removes_its_rest(
    client, tmp_path, how, at, left
):
    """`at`: before the exchange or the renames (calls: exchange, rename, rename), or before the old one is removed."""
    await checkpoint.save(client, tmp_path / "c", metadata={"step": 1})
    code = [sys.executable, "-c", KILLED, str(tmp_path / "c"), how, str(at)]
    killed = await asyncio.create_subprocess_exec(*code)
    assert await asyncio.wait_for(killed.wait(), 60) == -signal.SIGKILL
    assert len(names(tmp_path)) == 2
    assert step(tmp_path / "c") == left
    await checkpoint.load(client, tmp_path / "c")
    await checkpoint.save(client, tmp_path / "c", metadata={"step": 3})
    assert names(tmp_path) == ["c"]
    assert step(tmp_path / "c") == 3


async def test_what_another_saver_is_writing_stays(client, tmp_path):
    target, work, file = placing.prepare(tmp_path / "c")
    await checkpoint.save(client, tmp_path / "c", metadata={"step": 1})
    assert names(tmp_path) == [work.name, "c"]
    file.close()
    await checkpoint.save(client, target, metadata={"step": 2})
    assert names(tmp_path) == ["c"]


async def test_what_only_looks_like_the_rest_of_a_save_stays(client, tmp_path):
    mine = [".c.save.12345678", ".c.save.1234567", ".other.save.12345678", ".c.old.12345678"]
    (tmp_path / mine[0]).touch()
    for name in mine[1:3]:
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / mine[3]).symlink_to("elsewhere")
    await checkpoint.save(client, tmp_path / "c")
    assert names(tmp_path) == sorted([*mine, "c", "elsewhere"])


async def test_nothing_is_left_over_where_a_checkpoint_was_never_saved(tmp_path):
    (tmp_path / ".c.old.12345678").mkdir()
    with pytest.raises(Invalid, match=r"/c holds no checkpoint of a queue: manifest.json is missing"):
        checkpoint.read_manifest(tmp_path / "c")


@pytest.mark.parametrize("there", ["checkpoint", "empty", "nothing"])
async def test_a_link_is_followed_and_stays(client, tmp_path, there):
    real, link = tmp_path / "disk" / "c", tmp_path / "c"
    real.parent.mkdir()
    link.symlink_to("disk/c")
    if there == "empty":
        real.mkdir()
    for number in range(1 + (there == "checkpoint")):
        await checkpoint.save(client, link, metadata={"step": number})
    assert link.is_symlink()
    assert step(real) == step(link) == number
    assert (names(real.parent), names(tmp_path)) == (["c"], ["c", "disk"])
    await checkpoint.load(client, link)


async def test_a_working_directory_is_not_replaced(client, tmp_path, monkeypatch):
    (tmp_path / "c").mkdir()
    monkeypatch.chdir(tmp_path / "c")
    for name in (".", tmp_path / "c", "../c", "../c/."):
        with pytest.raises(Invalid, match=r"/c is this process' working directory.*name a directory in it, such as"):
            await checkpoint.save(client, name)
    await checkpoint.save(client, "checkpoint", metadata={"step": 1})
    await checkpoint.save(client, "checkpoint", metadata={"step": 2})
    assert step("checkpoint") == 2
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("known", [True, False])
async def test_a_mount_point_is_not_replaced(client, tmp_path, monkeypatch, known):
    """Known before, or only by the kernel's refusal (a bind mount of the same filesystem)."""
    (tmp_path / "c").mkdir()
    if known:
        monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "c")
    else:

        def busy(*_: Any) -> bool:
            raise OSError(16, "Device or resource busy")

        monkeypatch.setattr(placing, "_exchange", busy)
    with pytest.raises(Invalid, match=r"/c is a mount point.*name a directory in it, such as .*/c/checkpoint"):
        await checkpoint.save(client, tmp_path / "c")
    assert names(tmp_path) == ["c"]


REMEDY = (
    "name another directory|name a directory in it|give the name of a directory|name what was saved|json is missing"
)

BAD = ["/dev/null", "/proc/x/y", "/", "x" * 300, f"/tmp/{'x' * 300}/y", None, ["a"], 3, b"/tmp/x", "", "a\0b"]


@pytest.mark.parametrize("name", BAD, ids=[repr(name)[:20] for name in BAD])
async def test_what_is_no_directory_is_named_with_the_remedy(client: QueueClient, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for verb in (checkpoint.save, checkpoint.load):
        with pytest.raises(Invalid, match=REMEDY) as error:
            await verb(client, name)
        assert repr(name).strip("'\"")[:60] in str(error.value)
    assert names(tmp_path) == []


async def test_a_link_to_itself_is_no_directory(client, tmp_path):
    (tmp_path / "c").symlink_to("c")
    with pytest.raises(Invalid, match=r"/c .*; name another directory"):
        await checkpoint.save(client, tmp_path / "c")
    with pytest.raises(Invalid, match=r"/c "):
        await checkpoint.load(client, tmp_path / "c")
    assert names(tmp_path) == ["c"]


async def test_metadata_that_contains_itself_is_refused(client, tmp_path):
    metadata: dict[str, Any] = {}
    metadata["self"] = metadata
    wrongs: list[Any] = [metadata, [metadata], {"x": "\ud800"}]
    for wrong in wrongs:
        with pytest.raises(Invalid, match="checkpoint metadata"):
            await checkpoint.save(client, tmp_path / "c", metadata=wrong)
    assert names(tmp_path) == []
