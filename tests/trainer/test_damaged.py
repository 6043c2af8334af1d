"""Rows whose stored bytes were changed: their groups leave, the others stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.single_controller.errors import WorkerFailed
from streamrl.trainer.damaged import DAMAGED, drop_damaged, is_damage
from streamrl.trainer.replay_buffer import LeasedBatch
from tests.queue.prompt_groups import TASKS, P, admit, generate, live
from transfer_queue.errors import Corrupt, NotFound
from transfer_queue.local import LocalQueue
from transfer_queue.net.messages import Block


def overwrite(directory: Path, block: Block) -> None:
    [file] = [path for path in directory.rglob(f"*{block.segment:016x}*") if path.is_file()]
    with file.open("r+b") as segment:
        segment.seek(block.offset)
        segment.write(b"\xff" * block.nbytes)


async def test_the_groups_that_cannot_be_read_are_dropped_and_named(tmp_path: Path) -> None:
    async with LocalQueue(directory=tmp_path / "queue") as queue:
        client = queue.client("trainer")
        await client.open_partition(P, tasks=TASKS, max_groups=8)
        await client.open_trainer(P, 0)
        await admit(client, 0, 1, 2)
        for order in range(3):
            await generate(client, order)
        leased = await client.lease(P, "train", groups=3, holder="trainer")
        located = await client.lookup(P, ["g1_1_0"], ["ids"])
        block = located.blocks[0]
        overwrite(tmp_path, block)
        with pytest.raises(Corrupt):
            await queue.client("rank").get(P, ["g1_1_0"])
        error = await drop_damaged(client, P, LeasedBatch(leased.token, leased.groups))
        assert "1 of the 3 groups" in str(error)
        assert "(g1)" in str(error)
        assert sorted(await live(client)) == ["g0", "g2"]
        changes = await client.watch(P, 0)
        assert [group.reason for group in changes.groups if group.uid == "g1"] == [DAMAGED]


def test_damage_is_known_also_when_a_rank_says_so() -> None:
    assert is_damage(Corrupt("block"))
    assert is_damage(WorkerFailed(1, 7, "update_actor", "Corrupt: block of 'input_ids'"))
    assert not is_damage(WorkerFailed(1, 7, "update_actor", "NotFound: no row"))
    assert not is_damage(NotFound("a row"))
