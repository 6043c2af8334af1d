"""The queue's part of a checkpoint: what is in it, and what of it comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.trainer import queue_cut
from streamrl.trainer.checkpoint import CheckpointError, CheckpointStore, TrainerState
from streamrl.trainer.queue_cut import QueueCut
from tests.queue.prompt_groups import TASKS, P, admit, content, generate, live
from tests.trainer.test_saving import ASYNC, Made
from transfer_queue.client import QueueClient
from transfer_queue.local import LocalQueue


@pytest.fixture
async def client() -> AsyncIterator[QueueClient]:
    async with LocalQueue() as queue:
        client = queue.client("trainer")
        await client.open_partition(P, tasks=TASKS)
        yield client


@pytest.fixture
async def other() -> AsyncIterator[QueueClient]:
    """Of an empty queue."""
    async with LocalQueue() as queue:
        client = queue.client("trainer")
        await client.open_partition(P, tasks=TASKS)
        yield client


def cut_of(client: QueueClient, include: Any = "auto") -> QueueCut:
    return QueueCut(client, P, "generate", include=include, computed=["advantages"])


async def finished(client: QueueClient, *orders: int) -> None:
    await admit(client, *orders)
    for order in orders:
        await generate(client, order)


async def test_a_cut_has_what_is_out_and_the_oldest_finished_groups_first(client: QueueClient) -> None:
    await finished(client, 2, 1, 0)
    await admit(client, 3)
    leased = await client.lease(P, "train", uids=["g1", "g2"])
    await client.ack(P, leased.token, ["g2"], step=1)
    cut = await cut_of(client).take()
    assert (cut.next_order, cut.outstanding) == (4, [0, 1, 3])
    assert [(group.uid, group.state) for group in cut.finished] == [("g0", "ready"), ("g1", "training")]
    assert (await cut_of(client).copy(cut)).uids == ["g0", "g1"]


async def test_a_group_that_leaves_while_the_queue_is_looked_at_is_not_in_the_cut(client: QueueClient) -> None:
    await finished(client, 0, 1)
    stats = client.stats

    async def after_a_drop(**options: Any) -> Any:
        await client.drop(P, ["g0"], "stale")
        return await stats(**options)

    client.stats = after_a_drop  # type: ignore[method-assign]
    cut = await cut_of(client).take()
    assert (cut.outstanding, [group.uid for group in cut.finished]) == ([1], ["g1"])


@pytest.mark.parametrize(("include", "counts"), [("auto", {1, 2}), ("always", {3}), ("never", {0})])
async def test_auto_stores_what_has_room_always_all_and_never_nothing(client, monkeypatch, include, counts) -> None:
    await finished(client, 0, 1, 2)
    everything = await cut_of(client, "always").copy(await cut_of(client, "always").take())
    monkeypatch.setattr(queue_cut, "AUTO_BYTES", everything.nbytes - 1)
    cut = cut_of(client, include)
    stored = (await cut.copy(await cut.take())).uids
    assert stored == ["g0", "g1", "g2"][: len(stored)]
    assert len(stored) in counts


async def test_a_last_checkpoint_holds_no_rows(client: QueueClient) -> None:
    await finished(client, 0)
    cut = await cut_of(client).take(rows=False)
    assert (cut.outstanding, cut.finished) == ([0], [])


async def test_what_ranks_computed_is_not_stored(client: QueueClient, other: QueueClient, tmp_path: Path) -> None:
    await finished(client, 0)
    before = await content(client)
    await client.put(P, ["g0_0_0"], {"advantages": [np.ones(3, np.float32)]})
    cut = cut_of(client)
    cut.write(await cut.copy(await cut.take()), tmp_path)
    assert await cut_of(other).restore(tmp_path, version=0) == ["g0"]
    assert await content(other) == before


async def test_groups_of_undone_weights_come_back_only_where_they_are_repeated(client, other, tmp_path) -> None:
    await admit(client, 0, 1)
    await generate(client, 0, version=4)
    await generate(client, 1, version=5)
    cut = cut_of(client)
    cut.write(await cut.copy(await cut.take()), tmp_path)
    assert await cut_of(other).restore(tmp_path, version=4) == ["g0"]
    assert await cut_of(other).restore(tmp_path, version=None) == ["g1"]


async def test_a_checkpoint_without_rows_restores_none(client: QueueClient, tmp_path: Path) -> None:
    cut = cut_of(client)
    cut.write(await cut.copy(await cut.take()), tmp_path)
    assert await cut.restore(tmp_path, version=0) == []
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


# --- in a run's checkpoints ------------------------------------------------------------------------------------------


@pytest.fixture
async def made(client: QueueClient, tmp_path: Path) -> AsyncIterator[Made]:
    """A saver whose cut is of a real queue."""
    made = Made(tmp_path / "runs", ASYNC, "trainer.save_freq=1")
    made.saver._cut = cut_of(client)
    made.ranks.may_write.set()
    yield made
    await made.saver.close()
    made.close()


async def test_a_cut_is_as_it_was_after_the_step_whatever_happens_while_it_is_written(made, client, other) -> None:
    await finished(client, 0, 1)
    before = await content(client)
    made.ranks.may_write.clear()
    made.train(1)
    await made.saver.save(1, {})
    await made.saver.copied()
    await client.drop(P, ["g0"], "stale")
    leased = await client.lease(P, "train", uids=["g1"])
    await client.put(P, ["g1_0_0"], {"advantages": [np.ones(3, np.float32)]}, token=leased.token)
    await client.ack(P, leased.token, ["g1"], step=2)
    made.ranks.may_write.set()
    await made.saver.finish()
    await cut_of(other).restore(made.saver.store.path(1), version=0)
    assert await content(other) == before


async def test_the_rows_are_in_the_manifest_and_a_flipped_bit_in_them_is_refused(made: Made, client) -> None:
    await finished(client, 0)
    made.train(1)
    await made.saver.save(1, {})
    await made.saver.finish()
    file = made.saver.store.path(1) / "queue/00000.rows"
    assert made.saver.store.load(1).outstanding == [0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged: queue/00000.rows is missing or has changed"):
        made.saver.store.load(1)


async def test_a_disk_that_is_full_for_rows_leaves_the_checkpoint_before(made, client, monkeypatch) -> None:
    await finished(client, 0, 1)
    made.train(1, 2)
    await made.saver.save(1, {})
    await made.saver.finish()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "queue")

    monkeypatch.setattr(queue_cut, "write_groups", full)
    await made.saver.save(2, {})
    with pytest.raises(OSError, match="No space left"):
        await made.saver.finish()
    store: CheckpointStore = made.saver.store
    assert [path.name for path in store.directory.iterdir()] == ["global_step_1"]
    assert isinstance(store.load(1), TrainerState)
    assert [commit[0] for commit in made.queue.commits] == [1]


async def test_rows_come_back_to_the_queue_of_a_copied_run(made: Made, client, other, tmp_path: Path) -> None:
    await finished(client, 0, 1)
    before = await content(client)
    made.train(1)
    await made.saver.save(1, {})
    await made.saver.finish()
    assert await made.saver.restore_rows(0) == [], "the queue has them"
    made.saver._cut = cut_of(other)
    assert await made.saver.restore_rows(0) == ["g0", "g1"]
    assert await content(other) == before
    assert {group.state for group in (await live(other)).values()} == {"ready"}
