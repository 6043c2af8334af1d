"""The actor without a model, on a virtual clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup
from streamrl.workers.sim_actor import SimActorWorker, SimTiming
from tests.workers.tiny import MemoryStore, make_rows

pytestmark = pytest.mark.timeout(20)


class AsyncStore:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def get(self, partition: str, keys: list[str], fields: list[str]) -> object:
        return self._store.get(partition, keys, fields)


async def test_an_update_takes_the_configured_time_and_reads_what_the_actor_reads() -> None:
    batch, store = make_rows(4, 2)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    worker = ClassWithInitArgs(SimActorWorker, SimTiming(2.0, 0.01, 0.5), queue=AsyncStore(store), sleep=sleep)
    group = LocalWorkerGroup(worker, inline=True)
    await group.init_model()
    metrics = await group.update_actor(batch)
    info = await group.publish_weights(3)
    tokens = sum(tag["seq_len"] for tag in batch.tags)
    assert slept == [pytest.approx(2 * 2.0 + 0.01 * tokens), 0.5]
    assert metrics["actor/optimizer_steps"] == 2.0
    assert metrics["data/bytes_read"] > 0
    assert store.reads == [["input_ids", "response_mask", "rollout_log_probs"]]
    assert (info.version, info.bytes) == (3, 0)
    await group.close()


async def test_equal_training_gives_an_equal_digest_also_after_a_restore(tmp_path: Path) -> None:
    batch, _ = make_rows(2, 2)

    async def sleep(seconds: float) -> None: ...

    def start() -> LocalWorkerGroup:
        return LocalWorkerGroup(ClassWithInitArgs(SimActorWorker, SimTiming(), sleep=sleep), inline=True)

    first, second = start(), start()
    await first.update_actor(batch)
    await first.save_checkpoint(str(tmp_path))
    await first.update_actor(batch)
    assert await second.state_digest() != await first.state_digest()
    await second.load_checkpoint(str(tmp_path))
    await second.update_actor(batch)
    assert await second.state_digest() == await first.state_digest()
