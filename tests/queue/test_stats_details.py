"""Who holds leases and which fields rows have, as `stats(details=True)` tells."""

from __future__ import annotations

import numpy as np

from transfer_queue.local import LocalQueue
from transfer_queue.net.messages import GroupSpec, TaskSpec

TASKS = [
    TaskSpec("generate", "prompt", "clock", ttl=30.0),
    TaskSpec("train", "rows", "clock", ttl=30.0, fields=["ids"]),
]


async def test_leases_are_told_by_holder_and_fields_by_rows() -> None:
    async with LocalQueue() as queue:
        client = queue.client("test")
        await client.open_partition("train", tasks=TASKS, max_groups=8)
        await client.admit("train", [GroupSpec(f"g{i}", 1, i) for i in range(5)], {"prompt": [np.arange(2)] * 5})
        for holder, groups in (("agent-0", 2), ("agent-1", 1)):
            await client.lease("train", "generate", groups=groups, holder=holder)
        await client.put("plain", ["a", "b"], {"ids": [np.arange(3)] * 2})
        await client.put("plain", ["b"], {"scores": [np.arange(1)]})
        stats = (await client.stats(details=True)).partitions
        assert [(held.task, held.holder, held.groups) for held in stats["train"].leases] == [
            ("generate", "agent-0", 2), ("generate", "agent-1", 1),
        ]  # fmt: skip
        assert all(0 <= held.oldest < 30 for held in stats["train"].leases)
        assert stats["plain"].fields == {"ids": 2, "scores": 1}
        await client.clear("plain", ["a"])
        assert (await client.stats(details=True)).partitions["plain"].fields == {"ids": 1, "scores": 1}


async def test_without_details_they_are_not_told() -> None:
    async with LocalQueue() as queue:
        client = queue.client("test")
        await client.put("plain", ["a"], {"ids": [np.arange(3)]})
        stats = (await client.stats()).partitions["plain"]
        assert (stats.leases, stats.fields) == ([], {})
