"""The actor on a real queue: what it reads, what it writes, and what a lost lease does to its writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup, WorkerFailed
from streamrl.workers.actor import ActorWorker
from streamrl.workers.row_store import LoopStore
from tests.workers.tiny import MemoryStore, make_model, make_rows, settings
from transfer_queue.client import QueueClient
from transfer_queue.errors import Fenced
from transfer_queue.local import LocalQueue
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.net.messages import GroupSpec, SessionClose, TaskSpec

TASKS = [TaskSpec("generate", "prompt"), TaskSpec("train", "rows", "incarnation", fields=["input_ids"])]


@pytest.fixture
async def queue() -> AsyncIterator[LocalQueue]:
    queue = LocalQueue()
    yield queue
    await queue.close()


async def fill(client: QueueClient, batch: KVBatchMeta, store: MemoryStore) -> None:
    """Put the rows there as an agent worker does, one group after the other."""
    await client.open_partition("train", tasks=TASKS)
    groups = {}
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        groups.setdefault(key.split("_")[0], []).append((key, tag))
    specs = [GroupSpec(uid, len(rows), order) for order, (uid, rows) in enumerate(groups.items())]
    await client.admit("train", specs, {"raw_prompt": [[{"role": "user"}]] * len(specs)})
    leased = await client.lease("train", "generate", groups=len(specs))
    for uid, rows in groups.items():
        keys = [key for key, _ in rows]
        columns = {name: [column[key] for key in keys] for name, column in store.columns.items()}
        closes = [SessionClose(uid, session, [key]) for session, key in enumerate(keys)]
        await client.put("train", keys, columns, tags=[tag for _, tag in rows], token=leased.token, closes=closes)


async def test_columns_come_from_the_queue_and_go_back_there(queue: LocalQueue, tmp_path: Path) -> None:
    batch, store = make_rows(2, 2)
    client = queue.client("trainer")
    await fill(client, batch, store)
    rows_of_actor = LoopStore(queue.client("actor-0"), asyncio.get_running_loop())
    worker = ClassWithInitArgs(ActorWorker, settings(make_model(tmp_path), bypass=False), rows_of_actor)
    group = LocalWorkerGroup(worker)
    await group.init_model()

    leased = await client.lease("train", "train", groups=2)
    batch.token = leased.token
    await group.compute_log_prob(batch)
    written = await client.get("train", batch.keys, ["old_log_probs", "entropy"])
    for i, tag in enumerate(batch.tags):
        assert written["old_log_probs"][i].dtype == np.float32
        assert len(written["old_log_probs"][i]) == len(written["entropy"][i]) == tag["response_len"]
    metrics = await group.update_actor(batch)
    assert metrics["actor/optimizer_steps"] == 2.0
    fields = ("input_ids", "response_mask", "rollout_log_probs")
    expected = sum(store.columns[name][key].nbytes for name in fields for key in batch.keys)
    assert metrics["data/bytes_read"] == expected + sum(4 * tag["response_len"] for tag in batch.tags)

    await client.open_trainer("train", 0)  # a new incarnation took over
    with pytest.raises(WorkerFailed, match="Fenced") as failure:
        await group.compute_log_prob(batch)
    assert isinstance(failure.value.__cause__, Fenced)
    await group.close()
