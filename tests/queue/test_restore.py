"""A trainer that is restored: which rows stay, and which of their fields."""

from __future__ import annotations

import numpy as np
import pytest

from transfer_queue.client import QueueClient
from transfer_queue.errors import NotFound
from transfer_queue.local import LocalQueue
from transfer_queue.net.messages import GroupSpec, SessionClose, TaskSpec

TASKS = [TaskSpec("generate", "prompt"), TaskSpec("train", "rows", "incarnation", fields=["input_ids"])]
TRAINED = {"values": [np.full(3, 0.5)], "old_log_probs": [np.full(3, -1.0)]}


@pytest.fixture
async def client(tmp_path):
    async with LocalQueue(directory=tmp_path) as queue:
        yield queue.client("both")


async def generated(client: QueueClient, *groups: tuple[str, int]) -> None:
    """Groups of one session, by the version that sampled it."""
    await client.open_partition("p", tasks=TASKS)
    await client.admit(
        "p", [GroupSpec(uid, 1, order) for order, (uid, _) in enumerate(groups)], {"x": [0] * len(groups)}
    )
    leased = await client.lease("p", "generate", groups=len(groups))
    for uid, version in groups:
        await client.put(
            "p", [f"{uid}_0_0"], {"input_ids": [np.arange(4)]}, tags=[{"max_global_steps": version}],
            token=leased.token, closes=[SessionClose(uid, 0, [f"{uid}_0_0"])],
        )  # fmt: skip


async def train(client: QueueClient, uid: str, *, acked: int | None = None) -> None:
    token = (await client.lease("p", "train", uids=[uid])).token
    await client.put("p", [f"{uid}_0_0"], TRAINED, token=token)
    if acked is not None:
        await client.ack("p", token, [uid], step=acked)


async def test_what_the_ranks_of_the_older_trainer_computed_is_gone_and_can_be_written_anew(client) -> None:
    await generated(client, ("u0", 0), ("u1", 0), ("u2", 0))
    await client.open_trainer("p", 0)
    await train(client, "u0", acked=1)
    await train(client, "u1", acked=2)
    await train(client, "u2")
    restored = await client.open_trainer("p", 1, columns=[*TRAINED, "never_written"])
    assert restored.ready == ["u1", "u2"]
    for uid in restored.ready:
        assert len((await client.get("p", [f"{uid}_0_0"], ["input_ids"]))["input_ids"].rows_list()) == 1
        with pytest.raises(NotFound, match=r"values|old_log_probs"):
            await client.get("p", [f"{uid}_0_0"], list(TRAINED))
        await train(client, uid, acked=2)
    await client.commit_step("p", 2)


async def test_rows_of_weights_that_no_longer_exist_are_issued_again_by_version_not_by_step(client) -> None:
    """Five steps of which three only warmed the critic up made two versions."""
    await generated(client, ("u0", 2), ("u1", 3))
    assert (await client.open_trainer("p", 5, version=2)).reissued == ["u1"]
