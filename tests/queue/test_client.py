"""QueueClient against the queue in this process: what is put comes back, in every form that may be put."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from transfer_queue.client import QueueClient
from transfer_queue.errors import Corrupt, DeadlineExceeded, Disconnected, Fenced, Invalid, NotFound, QueueFull
from transfer_queue.keys import row_key
from transfer_queue.local import LocalQueue
from transfer_queue.net.messages import GroupSpec, SessionClose, TaskSpec, Token
from transfer_queue.storage.columns import Column
from transfer_queue.storage.segments import map_segment

GENERATE = TaskSpec("generate", "prompt", "clock", 5.0)
TRAIN = TaskSpec("train", "rows", "incarnation")


@pytest.fixture
async def queue():
    async with LocalQueue(unit_budget_bytes=64 << 20, segment_bytes=64 << 10) as queue:
        yield queue


@pytest.fixture
async def client(queue):
    return queue.client("trainer")


async def admit(client: QueueClient, *uids: str, n: int = 1, **options) -> None:
    groups = [GroupSpec(uid, n, order) for order, uid in enumerate(uids)]
    await client.admit("p", groups, {"raw_prompt": [[{"role": "user", "content": uid}] for uid in uids]}, **options)


async def test_every_form_of_a_column_comes_back(client):
    columns = {
        "dense": np.arange(6, dtype=np.float32).reshape(2, 3),
        "ragged": [np.array([1, 2, 3]), np.array([4])],
        "objects": [{"score": 1.0, "tools": ("a", None)}, "text"],
        "column": Column.ragged([np.zeros(0, np.int32), np.ones(5, np.int32)]),
    }
    meta = await client.put("p", ["a", "b"], columns, tags=[{"status": "success"}, {}])
    assert (meta.keys, meta.tags, meta.fields) == (["a", "b"], [{"status": "success"}, {}], sorted(columns))
    got = await client.get("p", ["b", "a"])
    assert got["dense"].values.tolist() == [[3, 4, 5], [0, 1, 2]]
    assert [row.tolist() for row in got["ragged"].rows_list()] == [[4], [1, 2, 3]]
    assert got["objects"].rows_list() == ["text", {"score": 1.0, "tools": ("a", None)}]
    assert got["column"].lengths().tolist() == [5, 0]


@pytest.mark.parametrize("rows_per_put", [1, 2, 16])
async def test_rows_of_many_puts_come_back_in_the_order_of_the_keys(client, rows_per_put):
    rows = {f"k{i}": np.arange(i % 7 + 1) + i for i in range(32)}
    names = list(rows)
    for at in range(0, 32, rows_per_put):
        part = names[at : at + rows_per_put]
        await client.put("p", part, {"x": [rows[k] for k in part], "n": np.array([len(rows[k]) for k in part])})
    asked = [names[i] for i in np.random.default_rng(0).permutation(32)] + ["k3"]
    got = await client.get("p", asked)
    assert all(np.array_equal(a, rows[k]) for a, k in zip(got["x"].rows_list(), asked, strict=True))
    assert got["n"].values.tolist() == [len(rows[k]) for k in asked]


async def test_what_is_got_is_a_copy(client):
    await client.put("p", ["a"], {"x": np.arange(3)[None]})
    (await client.get("p", ["a"]))["x"].values[:] = 9
    assert (await client.get("p", ["a"]))["x"].values.tolist() == [[0, 1, 2]]


async def test_a_field_put_in_different_forms_comes_back_as_one_column(client):
    await client.put("p", ["a"], {"x": np.array([[1, 2]]), "y": np.array([1.0])})
    await client.put("p", ["b"], {"x": [np.array([3])], "y": ["text"]})
    got = await client.get("p", ["a", "b"])
    assert [row.tolist() for row in got["x"].rows_list()] == [[1, 2], [3]]
    assert got["y"].rows_list() == [1.0, "text"]


async def test_a_put_larger_than_a_segment_gets_one_of_its_own(client):
    big = np.random.default_rng(0).integers(0, 255, (2, 300_000), dtype=np.uint8)
    await client.put("p", ["a", "b"], {"big": big, "small": np.arange(2)})
    assert np.array_equal((await client.get("p", ["a", "b"]))["big"].values, big)


async def test_a_put_larger_than_any_unit_is_refused_and_says_so(client):
    with pytest.raises(Invalid, match="budget"):
        await client.put("p", ["a"], {"big": np.zeros((1, 65 << 20), np.uint8)})


async def test_missing_rows_and_fields_are_named(client):
    await client.put("p", ["a"], {"x": np.arange(1)})
    with pytest.raises(NotFound, match="'zz'"):
        await client.get("p", ["a", "zz"])
    with pytest.raises(NotFound, match="'advantages'"):
        await client.get("p", ["a"], ["advantages"])


async def test_columns_and_keys_must_agree(client):
    with pytest.raises(Invalid, match="'x' has 2 rows for 1 keys"):
        await client.put("p", ["a"], {"x": np.arange(2)})
    with pytest.raises(Invalid, match="twice"):
        await client.put("p", ["a", "a"], {"x": np.arange(2)})


async def test_bytes_changed_behind_the_queue_are_found_out(queue, client):
    await client.put("p", ["a"], {"x": np.arange(8)[None]})
    located = await client.lookup("p", ["a"])
    block = located.blocks[0]
    map_segment(located.units[0].directory, block.segment, write=True).data[block.offset] ^= 1
    with pytest.raises(Corrupt, match="digest"):
        await client.get("p", ["a"])


async def test_storage_stays_bounded_when_rows_are_cleared(queue, client):
    for i in range(40):
        await client.put("p", [f"k{i}"], {"x": np.zeros((1, 40_000), np.uint8)})
        await client.clear("p", [f"k{i}"])
    (unit,) = (await client.stats()).units
    assert unit.segments <= 8


async def test_a_put_waits_for_storage_that_a_clear_frees():
    async with LocalQueue(unit_budget_bytes=4 << 16, segment_bytes=1 << 16) as queue:
        client = queue.client("writer")
        keys = [f"k{i}" for i in range(6)]

        async def fill():
            for key in keys:
                await client.put("p", [key], {"x": np.zeros((1, 60_000), np.uint8)})

        task = asyncio.create_task(fill())
        await asyncio.sleep(0.1)
        assert not task.done()
        await queue.client("reader").clear("p", keys[:3])
        await asyncio.wait_for(task, 5)


async def test_who_only_admits_gives_its_full_segments_back(client):
    await client.open_partition("p", tasks=[GENERATE])
    for i in range(40):
        await client.admit("p", [GroupSpec(f"u{i}", 1, i)], {"prompt": np.zeros((1, 40_000), np.uint8)})
        await client.drop("p", [f"u{i}"], "stale")
    (unit,) = (await client.stats()).units
    assert unit.segments <= 8


async def test_a_group_goes_from_admission_to_training(client):
    await client.open_partition("p", tasks=[GENERATE, TRAIN], max_groups=4)
    await admit(client, "u0", n=2)
    leased = await client.lease("p", "generate", groups=1)
    assert (await client.get("p", ["u0"]))["raw_prompt"][0] == [{"role": "user", "content": "u0"}]
    for session in range(2):
        key = row_key("u0", session)
        closes = [SessionClose("u0", session, [key])]
        await client.put("p", [key], {"responses": [np.arange(3)]}, token=leased.token, closes=closes)
    batch = await client.lease("p", "train", groups=1)
    assert [row.key for row in batch.groups[0].rows] == ["u0_0_0", "u0_1_0"]
    await client.ack("p", batch.token, ["u0"], step=1)
    await client.commit_step("p", 1)
    assert (await client.stats()).partitions["p"].outstanding == []


async def test_a_waiting_lease_wakes_at_once(queue, client):
    await client.open_partition("p", tasks=[GENERATE])
    waiting = asyncio.create_task(queue.client("worker").lease("p", "generate", groups=1, wait=30))
    await asyncio.sleep(0)
    await admit(client, "u0")
    assert [group.uid for group in (await asyncio.wait_for(waiting, 1)).groups] == ["u0"]


async def test_waits_that_end_without_anything_say_what_they_waited_for(client):
    await client.open_partition("p", tasks=[GENERATE], max_groups=1)
    with pytest.raises(DeadlineExceeded, match="generate"):
        await client.lease("p", "generate", groups=1, wait=0.05)
    await admit(client, "u0")
    with pytest.raises(QueueFull):
        await admit(client, "u1", wait=0.05)
    seq = (await client.watch("p", -1)).seq
    assert (await client.watch("p", seq, wait=0.05)).groups == []


async def test_a_lease_that_arrives_after_its_caller_gave_up_goes_back(queue, client):
    await client.open_partition("p", tasks=[GENERATE])
    worker = queue.client("worker")
    waiting = asyncio.create_task(worker.lease("p", "generate", groups=1, wait=30))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await admit(client, "u0")
    assert (await client.lease("p", "generate", groups=1, wait=1)).groups[0].uid == "u0"


async def test_a_client_that_leaves_gives_its_leases_back_and_fences_itself(queue, client):
    await client.open_partition("p", tasks=[GENERATE])
    await admit(client, "u0")
    worker = queue.client("worker")
    old = await worker.lease("p", "generate", groups=1)
    await worker.close()
    again = await client.lease("p", "generate", groups=1, wait=1)
    assert again.groups[0].attempt == 1
    with pytest.raises(Fenced):
        await client.put("p", [row_key("u0", 0)], {"x": np.arange(1)}, token=old.token)
    with pytest.raises(Disconnected, match="'worker' was closed"):
        await worker.stats()


async def test_leases_expire_by_the_clock_that_was_given():
    now = 100.0
    async with LocalQueue(clock=lambda: now) as queue:
        client = queue.client("trainer")
        await client.open_partition("p", tasks=[GENERATE])
        await admit(client, "u0")
        await queue.client("worker").lease("p", "generate", groups=1)
        now += GENERATE.ttl + 1
        queue.tick()
        assert (await client.lease("p", "generate", groups=1, wait=1)).groups[0].attempt == 1


async def test_a_queue_with_a_directory_goes_on_where_it_ended(tmp_path):
    async with LocalQueue(directory=tmp_path) as queue:
        await queue.client("a").put("p", ["k"], {"x": np.arange(3)[None]}, tags=[{"t": 1}])
    async with LocalQueue(directory=tmp_path) as queue:
        client = queue.client("b")
        assert (await client.get("p", ["k"]))["x"].values.tolist() == [[0, 1, 2]]
        assert await client.list("p") == {"p": {"k": {"t": 1}}}


async def test_a_local_queue_leaves_nothing_behind(tmp_path):
    async with LocalQueue(storage_dir=tmp_path) as queue:
        await queue.client("a").put("p", ["k"], {"x": np.arange(3)[None]})
        assert os.listdir(tmp_path)
    assert not os.listdir(tmp_path)


async def test_torch_tensors_dense_and_jagged_can_be_put(client):
    torch = pytest.importorskip("torch")
    jagged = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)
    await client.put("p", ["a", "b"], {"j": jagged, "h": torch.ones(2, 2, dtype=torch.bfloat16)})
    got = await client.get("p", ["b", "a"])
    assert [row.tolist() for row in got["j"].rows_list()] == [[0], [0, 1, 2]]
    assert (got["h"].dtype, got["h"].values.dtype) == ("bfloat16", np.uint16)


def verbs_of_names(client: QueueClient) -> dict:
    token = Token(1, 1)
    return {
        "put": lambda names: client.put("p", names, {"x": np.arange(2)}),
        "get": lambda names: client.get("p", names),
        "get, fields": lambda names: client.get("p", ["a"], names),
        "lookup": lambda names: client.lookup("p", names),
        "clear": lambda names: client.clear("p", names),
        "find": lambda names: client.find("p", keys=names),
        "fetch": lambda names: client.fetch("p", "t", names, 1),
        "lease": lambda names: client.lease("p", "t", uids=names),
        "ack": lambda names: client.ack("p", token, names),
        "nack": lambda names: client.nack("p", token, names),
        "drop": lambda names: client.drop("p", names, "stale"),
        "replay": lambda names: client.replay("p", names),
        "open_trainer": lambda names: client.open_trainer("p", 0, columns=names),
    }


async def test_one_string_is_not_taken_for_a_list_of_its_letters(client):
    await client.put("p", ["a", "b", "ab"], {"x": np.arange(3)})
    for call in verbs_of_names(client).values():
        for names in ("ab", b"ab", 5):
            with pytest.raises(TypeError, match="give a list of names"):
                await call(names)
    assert list((await client.list())["p"]) == ["a", "b", "ab"]


async def test_a_wait_that_cannot_be_meant_is_refused_by_every_verb(client):
    verbs = {
        "put": lambda wait: client.put("p", ["k"], {"x": np.arange(1)}, wait=wait),
        "admit": lambda wait: client.admit("p", [], {}, wait=wait),
        "lease": lambda wait: client.lease("p", "t", groups=1, wait=wait),
        "watch": lambda wait: client.watch("p", -1, wait=wait),
        "fetch": lambda wait: client.fetch("p", "t", ["x"], 1, wait=wait),
    }
    for call in verbs.values():
        for wait in (float("nan"), float("inf"), 1e300, -1, 1 << 5000):
            with pytest.raises(Invalid, match="give seconds, from 0"):
                await call(wait)
        for odd in ("1", b"", [], True):
            with pytest.raises(TypeError, match="give seconds"):
                await call(odd)
    assert await client.list() == {}
    await client.put("p", ["k"], {"x": np.arange(1)}, wait=np.float32(0.5))


async def test_no_more_rows_are_asked_for_than_there_can_be(client):
    for count in (0, -1, 1 << 40, 1 << 5000, None, 1.5):
        with pytest.raises(Invalid, match="count=.*expected 1 to"):
            await client.fetch("p", "t", ["x"], count)


async def test_a_column_that_no_memory_holds_is_an_error_that_names_its_field_and_size(client):
    endless = np.broadcast_to(np.zeros(1), (2, 1 << 45))
    with pytest.raises(Invalid, match=f"field 'x' .{endless.nbytes} bytes. does not fit"):
        await client.put("p", ["a", "b"], {"x": endless})
