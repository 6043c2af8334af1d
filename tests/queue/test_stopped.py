"""A process that stands still, and a clock that jumps: others go on, what comes late is refused, nothing changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
import time

import numpy as np
import pytest

from transfer_queue.client import QueueClient
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.local import LocalQueue
from transfer_queue.net.messages import GroupSpec, SessionClose, TaskSpec
from transfer_queue.service.queue_service import QueueService

TTL = 1.0

TASKS = [TaskSpec("generate", "prompt", ttl=60.0), TaskSpec("score", "rows", ttl=TTL, max_deliver=9)]

CONSUMER = """
    import sys
    from transfer_queue.errors import QueueError
    from transfer_queue.clients.sync_client import SyncQueueClient
    consumer = SyncQueueClient({address!r}, "stopped")
    leased = consumer.lease("p", "score", groups=1, wait=30)
    print(leased.groups[0].uid, flush=True)
    sys.stdin.readline()
    try:
        consumer.ack("p", leased.token, [leased.groups[0].uid])
        print("accepted", flush=True)
    except QueueError as error:
        print(type(error).__name__, flush=True)
"""


async def ready_groups(client: QueueClient, uids: list[str]) -> None:
    await client.admit("p", [GroupSpec(uid, 1, int(uid[1:])) for uid in uids], {"raw_prompt": uids})
    leased = await client.lease("p", "generate", uids=uids)
    keys = [f"{uid}_0_0" for uid in uids]
    closes = [SessionClose(uid, 0, [key]) for uid, key in zip(uids, keys, strict=True)]
    await client.put("p", keys, {"x": np.arange(len(keys))[:, None]}, token=leased.token, closes=closes)


async def work_off(client: QueueClient, count: int) -> tuple[list[str], float]:
    """Lease, read and ack so many groups: their uids, and the longest that one took."""
    uids, longest = [], 0.0
    for _ in range(count):
        began = time.monotonic()
        leased = await client.lease("p", "score", groups=1, wait=10.0)
        (group,) = leased.groups
        await client.get("p", [row.key for row in group.rows])
        await client.ack("p", leased.token, [group.uid])
        uids.append(group.uid)
        longest = max(longest, time.monotonic() - began)
    return uids, longest


@pytest.mark.chaos
async def test_a_stopped_consumer_holds_up_nobody_and_its_late_ack_is_fenced(tmp_path) -> None:
    service = QueueService(tmp_path / "q", storage_dir=tmp_path, units=1, unit_budget_bytes=16 << 20)
    address = await service.astart()
    client = await QueueClient.connect(address, name="c")
    await client.open_partition("p", tasks=TASKS)
    await ready_groups(client, [f"u{i}" for i in range(40)])
    consumer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(CONSUMER.format(address=address)),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert consumer.stdin is not None
    assert consumer.stdout is not None
    try:
        held = (await asyncio.wait_for(consumer.stdout.readline(), 20)).decode().strip()
        os.kill(consumer.pid, signal.SIGSTOP)
        others, longest = await work_off(client, 39)
        assert held not in others
        assert longest < 1.0, "others waited for the one that is stopped"
        again, _ = await work_off(client, 1)
        assert again == [held], "its group did not come back"
        os.kill(consumer.pid, signal.SIGCONT)
        consumer.stdin.write(b"go on\n")
        said = (await asyncio.wait_for(consumer.stdout.readline(), 20)).decode().strip()
        assert said == "Fenced"
        with pytest.raises(DeadlineExceeded):
            await client.lease("p", "score", groups=1, wait=0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            consumer.kill()
        await consumer.wait()
        await client.close()
        await service.astop(clean=True)


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
async def test_a_jump_of_the_wall_clock_ends_no_lease_and_no_wait(tmp_path, monkeypatch, jump) -> None:
    async with LocalQueue(directory=tmp_path / "q") as queue:
        client = queue.client("c")
        await client.open_partition("p", tasks=TASKS)
        await ready_groups(client, ["u0", "u1"])
        leased = await client.lease("p", "score", groups=1)
        waiting = asyncio.create_task(client.watch("p", (await client.watch("p", -1)).seq, wait=30.0))
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        await asyncio.sleep(0.05)
        queue.tick()
        assert not waiting.done()
        await client.renew("p", leased.token)
        assert (await client.get("p", ["u0_0_0"]))["x"].values.tolist() == [[0]]
        await client.ack("p", leased.token, [group.uid for group in leased.groups])
        assert (await asyncio.wait_for(waiting, 5)).groups
    async with LocalQueue(directory=tmp_path / "q") as queue:
        depth = (await queue.client("d").stats()).partitions["p"].depth
        assert (depth["trained"], depth["ready"]) == (1, 1)
