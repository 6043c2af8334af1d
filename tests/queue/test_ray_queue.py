"""The queue on a Ray cluster of several nodes, all on this machine: units on each, deaths, nodes that come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer_queue.client import QueueClient
from transfer_queue.net.messages import GroupSpec, SessionClose, TaskSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LOST_AFTER = 8.0

SPILL = 200 << 20
"""Bytes; nothing needs them here."""

ROW = 1 << 20


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    store = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=store)
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    ray.init(cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
async def queue(cluster, tmp_path, monkeypatch):
    from transfer_queue.service import ray_queue

    monkeypatch.setattr(ray_queue, "NODES_EVERY", 0.5)
    queue = ray_queue.RayQueue(
        tmp_path / "queue", storage_dir=tmp_path, unit_budget_bytes=96 << 20, unit_lost_after=LOST_AFTER,
        spill_budget_bytes=SPILL,
    )  # fmt: skip
    await queue.astart()
    yield queue
    await queue.astop(clean=True)


@pytest.fixture
async def client(queue, monkeypatch):
    monkeypatch.setenv("TQ_FORCE_REMOTE", "1")  # as from a third node
    client = await QueueClient.connect(queue.address, name="trainer")
    yield client
    await client.close()


async def units(client: QueueClient) -> dict[int, int]:
    """Bytes used by each unit that serves."""
    return {unit.unit: unit.used for unit in (await client.stats()).units if unit.alive}


async def until(condition: Callable[[], Awaitable[Any]], within: float) -> float:
    """Seconds until it held."""
    began = time.monotonic()
    async with asyncio.timeout(within):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return time.monotonic() - began


async def put_groups(client: QueueClient, first: int, count: int) -> dict[str, np.ndarray]:
    """Ready groups of one row each, put one by one so that they lie in all units."""
    generate = TaskSpec("generate", "prompt", "clock", 600.0)
    await client.open_partition("p", tasks=[generate, TaskSpec("train", "rows", "incarnation")])
    rows = {}
    for i in range(first, first + count):
        await client.admit("p", [GroupSpec(f"u{i}", 1, i)], {"raw_prompt": [f"prompt {i}"]})
        leased = await client.lease("p", "generate", uids=[f"u{i}"])
        key, row = f"u{i}_0_0", np.random.default_rng(i).integers(0, 255, ROW, dtype=np.uint8)
        await client.put("p", [key], {"x": row[None]}, token=leased.token, closes=[SessionClose(f"u{i}", 0, [key])])
        rows[key] = row
    return rows


async def assert_stored(client: QueueClient, rows: dict[str, np.ndarray]) -> None:
    got = await client.get("p", list(rows), ["x"])
    assert all(np.array_equal(a, b) for a, b in zip(got["x"].values, rows.values(), strict=True))


async def test_units_lie_on_each_node_and_a_killed_head_is_back_within_five_seconds(queue, client):
    assert queue.address["network"].startswith("curve://")
    rows = await put_groups(client, 0, 40)
    used = await units(client)
    assert sorted(used) == [0, 1]
    assert all(used.values())
    assert [unit.spill_budget for unit in (await client.stats()).units] == [SPILL, SPILL]
    await assert_stored(client, rows)
    head = int(Path(f"/proc/{(await queue.pids())['controller']}/stat").read_text().rsplit(")", 1)[1].split()[1])  # noqa: ASYNC240
    os.kill(head, signal.SIGKILL)
    began = time.monotonic()
    await client.put("p", ["after"], {"x": np.zeros((1, ROW), np.uint8)})
    took = time.monotonic() - began
    await assert_stored(client, rows)
    assert took < 5.0
    killed = (await queue.pids())["unit-1"]
    os.kill(killed, signal.SIGKILL)
    await asyncio.wait_for(assert_stored(client, rows), 10)


async def test_a_node_lost_for_good_gives_its_groups_back_and_a_new_node_gets_units(queue, client, cluster):
    await put_groups(client, 0, 40)
    third = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    await until(lambda: has_unit(client, 2), 60)
    before = await put_groups(client, 40, 40)
    on_third = (await units(client))[2]
    assert on_third > 0
    cluster.remove_node(third, allow_graceful=False)

    async def lost() -> bool:
        return (await client.stats()).partitions["p"].depth["pending"] > 0

    took = await until(lost, 120)
    assert took >= LOST_AFTER - 1
    depth = (await client.stats()).partitions["p"].depth
    assert depth["pending"] + depth["ready"] == 80
    keys = list((await client.list("p"))["p"])
    kept = {key: row for key, row in before.items() if key in keys}
    assert 0 < len(kept) < 40
    await assert_stored(client, kept)
    assert sorted(await units(client)) == [0, 1]


async def has_unit(client: QueueClient, number: int) -> bool:
    return number in await units(client)


async def test_two_runs_share_a_cluster_and_nothing_else(queue, client, cluster, tmp_path):
    from transfer_queue.service.ray_queue import RayQueue

    other = RayQueue(tmp_path / "other", storage_dir=tmp_path, unit_budget_bytes=32 << 20)
    address = await other.astart()
    assert address["run"] != queue.address["run"]
    assert address["network"] != queue.address["network"]
    theirs = await QueueClient.connect(address, name="other")
    await client.put("p", ["a"], {"x": np.arange(3)[None]})
    assert await theirs.list() == {}
    await theirs.put("p", ["a"], {"x": np.arange(4)[None]})
    await theirs.close()
    await other.astop(clean=True)
    assert (await client.get("p", ["a"]))["x"].values.tolist() == [[0, 1, 2]]


def test_init_starts_a_queue_on_all_nodes_and_their_workers_find_it(cluster, monkeypatch):
    """As a program for TransferQueue does it."""
    import ray

    import transfer_queue as tq

    @ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
    def work(key: str) -> tuple[str, list[int]]:
        import transfer_queue as tq

        tq.init()
        tq.kv_put(key, "p", {"x": np.arange(3)}, {"from": key})
        seen = tq.kv_batch_get("driver", "p")["x"].unbind()[0].tolist()
        tq.close()
        return ray.get_runtime_context().get_node_id(), seen

    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    whole: Any = tq.init({"units": 1, "unit_budget_bytes": 96 << 20})
    monkeypatch.delenv("TQ_ADDRESS")
    try:
        assert whole.address.network.startswith("curve://")
        tq.kv_put("driver", "p", {"x": np.arange(4)})
        found = ray.get([work.remote(f"w{i}") for i in range(2)], timeout=120)
        assert len({node for node, _ in found}) == 2
        assert [seen for _, seen in found] == [[0, 1, 2, 3]] * 2
        assert tq.kv_list("p")["p"] == {"driver": {}, "w0": {"from": "w0"}, "w1": {"from": "w1"}}
        assert tq.kv_batch_get(["w0", "w1"], "p")["x"].size(0) == 2
    finally:
        tq.close()
