"""Finished groups copied, written and made ready again in a queue that does not have them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.queue.prompt_groups import TASKS, P, admit, content, generate, live
from transfer_queue import checkpoint
from transfer_queue.checkpoint import groups as of_groups
from transfer_queue.client import QueueClient
from transfer_queue.errors import Corrupt, Invalid
from transfer_queue.local import LocalQueue
from transfer_queue.net.messages import SessionClose


@pytest.fixture
async def client() -> Any:
    async with LocalQueue() as queue:
        client = queue.client("first")
        await client.open_partition(P, tasks=TASKS)
        yield client


@pytest.fixture
async def other() -> Any:
    """Of an empty queue."""
    async with LocalQueue() as queue:
        client = queue.client("second")
        await client.open_partition(P, tasks=TASKS)
        yield client


async def saved(client: QueueClient, directory: Path, **options: Any) -> list[str]:
    groups = (await client.watch(P, -1)).groups
    copy = await checkpoint.copy_groups(client, P, groups, **options)
    checkpoint.write_groups(copy, directory)
    return copy.uids


async def test_finished_groups_are_ready_again_in_an_empty_queue_as_they_were(client, other, tmp_path: Path) -> None:
    await admit(client, 0, 1, 2, 3)
    await generate(client, 1)
    await generate(client, 3)
    before = await content(client)
    await client.lease(P, "train", uids=["g3"])
    assert await saved(client, tmp_path / "c") == ["g1", "g3"]
    assert await checkpoint.load_groups(other, tmp_path / "c", P, "generate") == ["g1", "g3"]
    assert await content(other) == before
    leased = await other.lease(P, "train", groups=2)
    assert [group.uid for group in leased.groups] == ["g1", "g3"]
    await other.ack(P, leased.token, ["g1", "g3"], step=1)


async def test_a_session_that_failed_stays_failed(client, other, tmp_path: Path) -> None:
    await admit(client, 0, n=3, least=2)
    await generate(client, 0, failed=(1,))
    before = await content(client)
    await saved(client, tmp_path / "c")
    await checkpoint.load_groups(other, tmp_path / "c", P, "generate")
    assert await content(other) == before
    assert before["g0"][3] == [0, 1, 2]


async def test_what_is_there_or_has_ended_is_left_alone(client, tmp_path: Path) -> None:
    await admit(client, 0, 1, 2, 3)
    for order in range(4):
        await generate(client, order)
    await saved(client, tmp_path / "c")
    await client.drop(P, ["g0"], "stale")
    leased = await client.lease(P, "train", uids=["g1", "g2"])
    await client.ack(P, leased.token, ["g1"], step=1)
    before = await content(client)
    assert await checkpoint.load_groups(client, tmp_path / "c", P, "generate") == []
    assert await content(client) == before
    assert {uid: group.state for uid, group in (await live(client)).items()} == {"g2": "training", "g3": "ready"}


async def test_a_group_that_is_to_be_generated_gets_the_sessions_that_it_lacks(client, other, tmp_path: Path) -> None:
    await admit(client, 0, 1)
    await generate(client, 0)
    await generate(client, 1)
    before = await content(client)
    await saved(client, tmp_path / "c")
    await admit(other, 0, 1)
    leased = await other.lease(P, "generate", uids=["g0"], holder="agent")
    close = SessionClose("g0", 0, ["g0_0_0"])
    columns = {"ids": [np.array([7, 7, 7])], "turns": np.array([0])}
    await other.put(P, ["g0_0_0"], columns, tags=[{"score": 9.0}], token=leased.token, closes=[close])
    await other.nack(P, leased.token, ["g0"], reason="given back")
    assert await checkpoint.load_groups(other, tmp_path / "c", P, "generate") == ["g0", "g1"]
    after = await content(other)
    assert after["g1"] == before["g1"]
    assert after["g0"][5]["g0_0_0"] == ({"score": 9.0}, {"ids": [7, 7, 7], "turns": 0})
    assert after["g0"][5]["g0_1_1"] == before["g0"][5]["g0_1_1"]


async def test_a_group_that_is_suspected_of_killing_its_holders_keeps_no_other_from_coming_back(
    client, other, tmp_path: Path
) -> None:
    await admit(client, 0, 1)
    await generate(client, 0)
    await generate(client, 1)
    before = await content(client)
    await saved(client, tmp_path / "c")
    await admit(other, 0, 1)
    for holder in ("first", "second"):
        await other.lease(P, "generate", uids=["g0", "g1"] if holder == "first" else ["g0"], holder=holder)
        await other.release_holder(holder)
    assert sorted(await checkpoint.load_groups(other, tmp_path / "c", P, "generate")) == ["g0", "g1"]
    assert await content(other) == before


async def test_groups_of_newer_weights_than_asked_for_are_not_restored(client, other, tmp_path: Path) -> None:
    await admit(client, 0, 1)
    await generate(client, 0, version=3)
    await generate(client, 1, version=4)
    await saved(client, tmp_path / "c")
    assert await checkpoint.load_groups(other, tmp_path / "c", P, "generate", version=3) == ["g0"]
    assert await checkpoint.load_groups(other, tmp_path / "c", P, "generate") == ["g1"]


async def test_fields_can_be_left_out(client, other, tmp_path: Path) -> None:
    await admit(client, 0)
    await generate(client, 0)
    await client.put(P, ["g0_0_0"], {"advantages": [np.ones(3, np.float32)]})
    await saved(client, tmp_path / "c", without=["advantages"])
    await checkpoint.load_groups(other, tmp_path / "c", P, "generate")
    assert sorted(await other.get(P, ["g0_0_0"])) == ["ids", "turns"]


async def test_as_many_of_the_first_groups_are_copied_as_have_room(client, other, tmp_path: Path) -> None:
    await admit(client, *range(6))
    for order in range(6):
        await generate(client, order)
    groups = (await client.watch(P, -1)).groups
    everything = await checkpoint.copy_groups(client, P, groups)
    some = await checkpoint.copy_groups(client, P, groups, limit=everything.nbytes // 2)
    assert 1 <= len(some.uids) < 6
    assert some.uids == everything.uids[: len(some.uids)]
    assert (await checkpoint.copy_groups(client, P, groups, limit=10)).uids == []
    checkpoint.write_groups(some, tmp_path / "c")
    assert await checkpoint.load_groups(other, tmp_path / "c", P, "generate") == some.uids


@pytest.mark.parametrize("limits", [(3, 1 << 20), (512, 2000)], ids=["rows", "bytes"])
async def test_many_groups_take_several_pages_of_whole_groups(client, other, tmp_path, monkeypatch, limits) -> None:
    monkeypatch.setattr(of_groups, "ROWS", limits[0])
    monkeypatch.setattr(of_groups, "BYTES", limits[1])
    await admit(client, *range(8))
    for order in range(8):
        await generate(client, order)
    before = await content(client)
    assert await saved(client, tmp_path / "c") == [f"g{order}" for order in range(8)]
    [entry] = checkpoint.read_manifest(tmp_path / "c").partitions
    assert len(entry.pages) >= 2
    await checkpoint.load_groups(other, tmp_path / "c", P, "generate")
    assert await content(other) == before


async def test_a_group_that_ends_while_groups_are_copied_is_left_out(client) -> None:
    await admit(client, 0, 1)
    await generate(client, 0)
    await generate(client, 1)
    groups = (await client.watch(P, -1)).groups
    await client.drop(P, ["g0"], "stale")
    assert (await checkpoint.copy_groups(client, P, groups)).uids == ["g1"]


async def test_a_page_that_no_queue_can_have_written_is_refused(client, other, tmp_path) -> None:
    await admit(client, 0)
    await generate(client, 0)
    copy = await checkpoint.copy_groups(client, P, (await client.watch(P, -1)).groups)
    [(rows, columns)] = copy.pages
    bent = [
        msgspec.structs.replace(rows, tags=[{"n": "two"}, *rows.tags[1:]]),
        msgspec.structs.replace(rows, keys=["other", *rows.keys[1:]]),
        msgspec.structs.replace(rows, tags=[*rows.tags[:-1], {"max_global_steps": "new"}]),
        msgspec.structs.replace(rows, keys=[*rows.keys[:-1], rows.keys[-2]]),
        msgspec.structs.replace(rows, tags=[{**rows.tags[0], "n": 3}, *rows.tags[1:]]),
    ]
    for number, one in enumerate(bent):
        copy.pages = [(one, columns)]
        checkpoint.write_groups(copy, tmp_path / f"{number}")
        with pytest.raises(Corrupt, match=str(tmp_path / f"{number}")):
            await checkpoint.load_groups(other, tmp_path / f"{number}", P, "generate")
    assert await live(other) == {}


async def test_plain_rows_are_no_groups(client, tmp_path: Path) -> None:
    await client.put("p", ["a"], {"x": np.arange(1)})
    await checkpoint.save(client, tmp_path / "c")
    with pytest.raises(Invalid, match="holds plain rows, no prompt groups"):
        await checkpoint.load_groups(client, tmp_path / "c", P, "generate")


async def test_a_full_disk_leaves_nothing_behind(client, tmp_path: Path, monkeypatch) -> None:
    await admit(client, 0)
    await generate(client, 0)
    copy = await checkpoint.copy_groups(client, P, (await client.watch(P, -1)).groups)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(of_groups, "write_page", full)
    with pytest.raises(OSError, match=r"the rows were not written \(No space left on device\)") as error:
        checkpoint.write_groups(copy, tmp_path / "c")
    assert error.value.filename == str(tmp_path / "c")
    assert os.listdir(tmp_path) == []
