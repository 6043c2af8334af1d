"""Dead letters: what killed its workers is kept with its prompt, can be looked at, replayed, or cleared."""

from __future__ import annotations

import pytest

from transfer_queue.client import QueueClient
from transfer_queue.errors import Conflict, NotFound
from transfer_queue.local import LocalQueue
from transfer_queue.net.messages import GroupSpec, SessionClose, TaskSpec

GENERATE = TaskSpec("generate", "prompt", "clock", 60.0, max_deliver=2)


@pytest.fixture
async def client(tmp_path):
    async with LocalQueue(directory=tmp_path / "queue") as queue:
        client = queue.client("worker")
        await client.open_partition("p", tasks=[GENERATE], max_groups=4)
        await client.admit("p", [GroupSpec(f"u{i}", 2, i) for i in range(2)], {"raw_prompt": ["first", "second"]})
        yield client


async def kill(client: QueueClient, uid: str) -> None:
    for _ in range(GENERATE.max_deliver):
        leased = await client.lease("p", "generate", uids=[uid])
        await client.nack("p", leased.token, [uid], reason="it divides by zero", poison=True)


async def test_a_dead_group_keeps_its_prompt_and_is_replayed_like_a_new_one(client):
    leased = await client.lease("p", "generate", uids=["u0"])
    close = SessionClose("u0", 0, ["u0_0_0"])
    await client.put("p", ["u0_0_0"], {"x": [[1]]}, token=leased.token, closes=[close])
    await client.nack("p", leased.token, ["u0"], poison=True)
    again = await client.lease("p", "generate", uids=["u0"])
    await client.nack("p", again.token, ["u0"], reason="it divides by zero", poison=True)
    stats = (await client.stats()).partitions["p"]
    assert stats.dead == {"u0": "it divides by zero (delivered 2 times)"}
    assert (await client.get("p", ["u0"]))["raw_prompt"].rows_list() == ["first"]
    with pytest.raises(NotFound):
        await client.get("p", ["u0_0_0"])

    since = (await client.watch("p", -1)).seq
    await client.replay("p", ["u0"])
    changed = await client.watch("p", since)
    assert [(group.uid, group.state, group.sessions) for group in changed.groups] == [("u0", "pending", [])]
    stats = (await client.stats()).partitions["p"]
    assert stats.dead == {}
    assert stats.depth["dead"] == 0
    leased = await client.lease("p", "generate", uids=["u0"])
    closes = [SessionClose("u0", s, [f"u0_{s}_0"]) for s in range(2)]
    await client.put("p", ["u0_0_0", "u0_1_0"], {"x": [[2], [3]]}, token=leased.token, closes=closes)
    assert (await client.stats()).partitions["p"].depth["ready"] == 1


async def test_a_replay_names_what_is_not_dead_and_changes_nothing(client):
    await kill(client, "u0")
    with pytest.raises(NotFound, match=r"'u1'.*can be replayed: 'u0'"):
        await client.replay("p", ["u0", "u1"])
    assert list((await client.stats()).partitions["p"].dead) == ["u0"]


async def test_a_dead_group_takes_no_writes_and_can_be_cleared_for_good(client):
    await kill(client, "u0")
    with pytest.raises(Conflict, match="too late"):
        await client.put("p", ["u0"], {"raw_prompt": ["another"]})
    before = (await client.stats()).partitions["p"].rows
    await client.clear("p", ["u0"])
    after = (await client.stats()).partitions["p"]
    assert after.rows == before - 1
    assert list(after.dead) == ["u0"]
    with pytest.raises(NotFound, match="or were cleared"):
        await client.replay("p", ["u0"])


async def test_dead_letters_are_there_after_a_restart(tmp_path):
    async with LocalQueue(directory=tmp_path / "queue") as queue:
        client = queue.client("worker")
        await client.open_partition("p", tasks=[GENERATE])
        await client.admit("p", [GroupSpec("u0", 1, 0)], {"raw_prompt": ["first"]})
        await kill(client, "u0")
    async with LocalQueue(directory=tmp_path / "queue") as queue:
        client = queue.client("worker")
        await client.replay("p", ["u0"])
        leased = await client.lease("p", "generate", groups=1)
        assert leased.groups[0].attempt == 2
        assert (await client.get("p", ["u0"]))["raw_prompt"].rows_list() == ["first"]
