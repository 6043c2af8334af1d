"""Survivors of segments that are nearly empty are moved, and their memory comes back."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from transfer_queue.controller import compaction
from transfer_queue.errors import QueueError
from transfer_queue.ledger import Ledger, dump, load
from transfer_queue.ledger.moving import Batch, survivors
from transfer_queue.local import LocalQueue
from transfer_queue.net.messages import Block, Clear, Commit, Compacted, Move, Moved, Spilled

SEGMENT = 64 << 10

BUDGET = 8 * SEGMENT
"""Less than the nine segments that three writers keep begun, and far less than the rows take."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(compaction, "QUIET", 0.0)


@pytest.fixture
async def queue():
    async with LocalQueue(unit_budget_bytes=64 << 20, segment_bytes=SEGMENT) as queue:
        yield queue


def columns(rows: range, width: int = 200) -> dict:
    return {
        "dense": np.stack([np.arange(i, i + width) for i in rows]),
        "ragged": [np.full(i % 50, i, np.int32) for i in rows],
        "objects": [{"i": i} for i in rows],
    }


def keys(rows) -> list[str]:
    return [f"k{i}" for i in rows]


async def check(client, rows: list[int]) -> None:
    got = await client.get("p", keys(rows))
    assert [row.tolist() for row in got["dense"].rows_list()] == [list(range(i, i + 200)) for i in rows]
    assert [row.tolist() for row in got["ragged"].rows_list()] == [[i] * (i % 50) for i in rows]
    assert got["objects"].rows_list() == [{"i": i} for i in rows]


def held(queue: LocalQueue) -> int:
    """Bytes of segments that are not spare."""
    return queue.core._grants.stats()[0].used - 2 * SEGMENT


def live(queue: LocalQueue) -> int:
    return sum(use.live for use in queue.core.ledger.segments.use.values())


async def settle(queue: LocalQueue) -> None:
    """Until nothing is left to be moved."""
    for _ in range(300):
        queue.tick()
        await asyncio.sleep(0.001)


async def test_clearing_all_but_one_row_of_a_large_put_frees_all_but_that_row(queue):
    client = queue.client("c")
    await client.put("p", keys(range(64)), columns(range(64), 200) | {"big": np.ones((64, 1 << 14))})
    await client.clear("p", keys(range(1, 64)))
    await settle(queue)
    assert held(queue) <= live(queue) + SEGMENT
    assert live(queue) < 200_000
    await check(client, [0])


async def test_what_a_unit_copies_at_once_is_bounded_also_of_one_large_put(queue, monkeypatch):
    client, copied, copying = queue.client("c"), [], queue._unit._compact

    def note(push):
        answer = copying(push)
        copied.append(answer.segment.nbytes)
        return answer

    monkeypatch.setattr(queue._unit, "_compact", note)
    await client.put("p", keys(range(1000)), columns(range(1000)))
    await client.clear("p", keys(i for i in range(1000) if i % 5))
    await settle(queue)
    assert len(copied) > 3
    assert max(copied) <= 1.5 * SEGMENT
    assert sum(copied) < 1.5 * live(queue)
    await check(client, list(range(0, 1000, 5)))


async def test_random_survivors_of_many_puts_take_little_more_than_they_are(queue):
    client, rng = queue.client("c"), random.Random(5)
    for at in range(0, 4000, 40):
        await client.put("p", keys(range(at, at + 40)), columns(range(at, at + 40)))
    left = sorted(rng.sample(range(4000), 40))
    await client.clear("p", keys(set(range(4000)) - set(left)))
    await settle(queue)
    assert held(queue) <= 2 * live(queue) + 2 * SEGMENT
    await check(client, left)


async def test_survivors_of_one_row_puts_are_gathered_into_few_blocks(queue):
    client = queue.client("c")
    for i in range(400):
        await client.put("p", keys([i]), columns(range(i, i + 1)))
    await client.clear("p", keys(i for i in range(400) if i % 20))
    await settle(queue)
    located = await client.lookup("p", keys(range(0, 400, 20)))
    assert len(located.blocks) < 3 * 8
    await check(client, list(range(0, 400, 20)))


def put(ledger: Ledger, names: list[str], segment: int, fields: list[str], offset: int = 0) -> None:
    blocks = [Block(f, segment, offset + 64 * i, 8 * len(names), len(names), "dense", "<i8", (), 7)
              for i, f in enumerate(fields)]  # fmt: skip
    ledger.apply(Commit("p", names, blocks), 0.0)


def where(ledger: Ledger, key: str, field: str) -> tuple[int, int]:
    rows = ledger.partition("p").rows
    block, index = rows.block_of(rows.ids[key], field)
    return block.segment, index


def moves(batches: list[Batch], segment: int) -> list[Moved]:
    """What a controller writes when a unit has copied them to `segment`."""
    return [
        batch.moved(
            [replace(b, segment=segment, rows=len(batch.serials), nbytes=8 * len(batch.serials))
             for b in batch.sources[0][0]]
        )
        for batch in batches
    ]  # fmt: skip


def test_rows_changed_or_cleared_while_they_are_copied_are_left_as_they_became():
    ledger = Ledger()
    put(ledger, ["a", "b", "c", "d", "e"], 1, ["x", "y"])
    put(ledger, ["b"], 9, ["x"])  # before: only its y is moved
    batches = survivors(ledger.partition("p").rows, {1}, 1 << 20)
    put(ledger, ["c"], 9, ["x"], offset=512)  # meanwhile
    ledger.apply(Clear("p", ["d", "e"]), 0.0)
    put(ledger, ["e"], 9, ["x", "y"], offset=1024)
    ledger.apply(Move("p", [1], moves(batches, 2)), 0.0)
    assert where(ledger, "a", "x") == where(ledger, "a", "y") == (2, 0)
    assert (where(ledger, "b", "x"), where(ledger, "b", "y")[0]) == ((9, 0), 2)
    assert (where(ledger, "c", "x"), where(ledger, "c", "y")) == ((9, 0), (1, 2))
    assert where(ledger, "e", "x") == where(ledger, "e", "y") == (9, 0)
    ledger.apply(Move("p", [1], moves(survivors(ledger.partition("p").rows, {1}, 1 << 20), 3)), 0.0)
    assert where(ledger, "c", "y") == (3, 0)
    assert 1 not in ledger.segments.use


@pytest.mark.parametrize("seed", range(5))
def test_live_bytes_are_those_of_the_living_rows_also_after_moves_and_in_a_snapshot(seed):
    rng, ledger = random.Random(seed), Ledger()
    for i in range(200):
        names = rng.sample([f"k{n}" for n in range(60)], rng.randint(1, 20))
        put(ledger, names, rng.randint(10, 15), rng.sample(["x", "y", "z"], rng.randint(1, 3)), offset=4096 * i)
        ledger.apply(Clear("p", rng.sample([f"k{n}" for n in range(60)], 5)), 0.0)
        if i % 20 == 19:
            from_, p = rng.randint(10, 15), ledger.partition("p")
            ledger.apply(Move("p", [from_], moves(survivors(p.rows, {from_}, 1 << 20), 100 + i)), 0.0)
            assert from_ not in ledger.segments.use
    expected = Counter()
    rows = ledger.partition("p").rows
    for row in rows.ids.values():
        for field in rows.fields_of(row):
            expected[rows.block_of(row, field)[0].segment] += 8
    assert {s: use.live for s, use in ledger.segments.use.items()} == expected
    assert {s: use.live for s, use in load(dump(ledger)).segments.use.items()} == expected


async def test_a_reader_whose_rows_are_moved_reads_them(queue):
    client = queue.client("c")
    await client.put("p", keys(range(400)), columns(range(400)))
    located = await client.lookup("p", keys([5]))
    view = await client.get("p", keys([5]), ["dense"], copy=False)
    await client.clear("p", keys(i for i in range(400) if i != 5))
    await settle(queue)
    with pytest.raises(QueueError, match="segment"):
        await client.read(located)
    assert view["dense"].values[0].tolist() == list(range(5, 205))
    await check(client, [5])


async def test_moved_rows_are_there_after_a_restart(tmp_path):
    async with LocalQueue(directory=tmp_path, segment_bytes=SEGMENT) as queue:
        client = queue.client("c")
        await client.put("p", keys(range(400)), columns(range(400)))
        before = (await client.lookup("p", keys([5]))).blocks
        await client.clear("p", keys(i for i in range(400) if i != 5))
        await settle(queue)
        assert (await client.lookup("p", keys([5]))).blocks != before
    async with LocalQueue(directory=tmp_path, segment_bytes=SEGMENT) as queue:
        await check(queue.client("c"), [5])


async def test_a_unit_that_cannot_copy_leaves_the_rows_where_they_are(queue, monkeypatch):
    client = queue.client("c")
    await client.put("p", keys(range(400)), columns(range(400)))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(queue._unit.files, "make", full)
    await client.clear("p", keys(i for i in range(400) if i != 5))
    await settle(queue)
    await check(client, [5])
    assert os.listdir(queue._unit.files.directory)


async def test_a_controller_whose_unit_is_away_is_not_called_again_and_again_to_move_its_rows(queue):
    client = queue.client("c")
    await client.put("p", keys(range(400)), columns(range(400)))
    unit = queue.core._grants.units[0]
    queue.core.client_gone(unit.client, queue.clock())
    await client.clear("p", keys(i for i in range(400) if i != 5))
    queue.tick()
    assert any(queue.core._compaction._thin.values())
    deadline = queue.core.next_deadline()
    assert deadline is None or deadline > queue.clock()


async def test_a_copy_that_no_controller_came_to_know_is_removed_with_the_next_registration(tmp_path, monkeypatch):
    async with LocalQueue(directory=tmp_path, segment_bytes=SEGMENT) as queue:
        client, copied = queue.client("c"), []
        await client.put("p", keys(range(400)), columns(range(400)))
        reporting = queue._unit._report

        async def lost(transport, answer):
            if not isinstance(answer, Compacted):
                return await reporting(transport, answer)
            copied.append(answer)

        monkeypatch.setattr(queue._unit, "_report", lost)
        await client.clear("p", keys(i for i in range(400) if i != 5))
        await settle(queue)
        assert copied
        assert copied[0].segment.segment in dict(queue._unit.files.inventory())
    async with LocalQueue(directory=tmp_path, segment_bytes=SEGMENT) as queue:
        await queue._registered
        assert copied[0].segment.segment not in dict(queue._unit.files.inventory())
        await check(queue.client("c"), [5])


@pytest.mark.parametrize("seed", range(3))
async def test_rows_are_what_was_put_whatever_is_moved_or_spilled_meanwhile(tmp_path, monkeypatch, seed):
    rng, model = random.Random(seed), {}
    async with LocalQueue(
        unit_budget_bytes=BUDGET, segment_bytes=SEGMENT, spill_dir=tmp_path, spill_budget_bytes=1 << 30
    ) as queue:
        clients, answers, reporting = [queue.client(f"c{i}") for i in range(3)], Counter(), queue._unit._report

        async def report(transport, answer) -> None:
            answers[type(answer)] += not answer.error
            await reporting(transport, answer)

        monkeypatch.setattr(queue._unit, "_report", report)

        async def put(client) -> None:
            rows, width = rng.sample(range(300), rng.randint(1, 30)), rng.choice([1, 50, 500])
            value = rng.randint(0, 1 << 40)
            fields = {"x": [np.full(width + i % 7, value + i) for i in rows], "y": [f"{value}-{i}" for i in rows]}
            fields = {name: fields[name] for name in rng.choice([["x"], ["y"], ["x", "y"]])}
            await client.put("p", keys(rows), fields)
            for n, i in enumerate(rows):
                model.setdefault(i, {}).update({name: values[n] for name, values in fields.items()})

        async def clear(client) -> None:
            rows = rng.sample(range(300), rng.randint(1, 120))
            await client.clear("p", keys(rows))
            for i in rows:
                model.pop(i, None)

        async def read(client) -> None:
            field = rng.choice(["x", "y"])
            rows = [i for i in rng.sample(range(300), 40) if field in model.get(i, {})]
            if rows:
                got = (await client.get("p", keys(rows), [field], copy=rng.random() < 0.7))[field].rows_list()
                assert all(np.array_equal(found, model[i][field]) for found, i in zip(got, rows, strict=True))

        await put(clients[0])
        for _ in range(400):
            await rng.choice([put, put, clear, read, read])(rng.choice(clients))
            if rng.random() < 0.2:
                await asyncio.sleep(0)
        await settle(queue)
        for _ in range(20):
            await read(clients[0])
        assert queue.core._grants.stats()[0].used <= BUDGET
        assert answers[Spilled] > 0
        assert answers[Compacted] > 0


async def test_nothing_is_due_while_the_unit_is_away(queue):
    """Else the controller would tick without end."""
    client = queue.client("c")
    await client.put("p", keys(range(400)), columns(range(400)))
    unit = queue.core._grants.units[0]
    queue.core.client_gone(unit.client, queue.clock())
    await client.clear("p", keys(range(1, 400)))
    assert queue.core._compaction.next_due() is None
    queue.tick()
    assert queue.core._compaction.next_due() is None
