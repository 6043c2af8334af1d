"""Views: rows that are read without a copy stay what they were, whatever happens to the rows."""

from __future__ import annotations

import asyncio
import gc
import os
import random

import numpy as np
import pytest

from transfer_queue.errors import Corrupt
from transfer_queue.local import LocalQueue
from transfer_queue.storage.segments import map_segment

KEYS = [f"k{i}" for i in range(8)]


@pytest.fixture
async def queue():
    async with LocalQueue(unit_budget_bytes=64 << 20, segment_bytes=64 << 10) as queue:
        yield queue


@pytest.fixture
async def client(queue):
    return queue.client("trainer")


def columns(seed: int, width: int = 50_000) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "dense": rng.integers(0, 1 << 40, (8, width)),
        "ragged": [rng.random(rng.integers(0, width)) for _ in KEYS],
        "objects": [{"seed": seed, "i": i} for i in range(8)],
    }


def same(got: dict, put: dict) -> bool:
    ragged = zip(got["ragged"].rows_list(), put["ragged"], strict=True)
    return (
        np.array_equal(got["dense"].values, put["dense"])
        and all(np.array_equal(a, b) for a, b in ragged)
        and got["objects"].rows_list() == put["objects"]
    )


def names(queue: LocalQueue, ending: str) -> list[str]:
    return [name for name in os.listdir(queue._unit.files.directory) if name.endswith(ending)]


async def test_a_view_holds_what_was_put_and_costs_no_copy(client):
    put = columns(0)
    await client.put("p", KEYS, put)
    before = client.bytes_read
    assert same(await client.get("p", KEYS, copy=False), put)
    assert client.bytes_read == before


async def test_a_part_in_put_order_is_a_view_and_any_other_order_a_copy(client):
    put = columns(0)
    await client.put("p", KEYS, put)
    before = client.bytes_read
    got = await client.get("p", KEYS[2:5], ["dense", "ragged"], copy=False)
    assert np.array_equal(got["dense"].values, put["dense"][2:5])
    assert [len(row) for row in got["ragged"].rows_list()] == [len(row) for row in put["ragged"][2:5]]
    assert client.bytes_read == before
    got = await client.get("p", KEYS[::-1], ["dense"], copy=False)
    assert np.array_equal(got["dense"].values, put["dense"][::-1])
    assert client.bytes_read > before


async def test_a_view_never_changes_when_its_rows_are_cleared_and_their_memory_is_used_again(queue, client):
    put = columns(0)
    await client.put("p", KEYS, put)
    got = await client.get("p", KEYS, copy=False)
    await client.clear("p", KEYS)
    for seed in range(1, 6):
        await client.put("p", KEYS, columns(seed))
        await client.get("p", KEYS)
        await client.clear("p", KEYS)
    assert names(queue, ".pool")  # memory was used again, only not that of the view
    assert same(got, put)


@pytest.mark.parametrize("held", [True, False])
async def test_memory_is_kept_for_use_again_unless_a_view_of_it_is_held(queue, client, held):
    await client.put("p", KEYS, columns(0))
    got = await client.get("p", KEYS, copy=False)
    part = got["dense"].values[3:] if held else None
    del got
    gc.collect()
    await client.clear("p", KEYS)
    for _ in range(20):
        await asyncio.sleep(0)  # the unit frees it
    assert bool(names(queue, ".pool")) is not held
    del part


async def test_what_is_written_to_a_view_is_seen_by_nobody_else(client):
    put = columns(0)
    await client.put("p", KEYS, put)
    mine, other = [await client.get("p", KEYS, copy=False) for _ in range(2)]
    mine["dense"].values[:] = -1
    assert same(other, put)
    assert same(await client.get("p", KEYS), put)
    assert (mine["dense"].values == -1).all()


async def test_a_row_written_anew_leaves_the_view_of_the_old_one(client):
    put = columns(0)
    await client.put("p", KEYS, put)
    got = await client.get("p", KEYS, copy=False)
    await client.put("p", KEYS, columns(1))
    assert same(got, put)
    assert same(await client.get("p", KEYS, copy=False), columns(1))


async def test_views_hold_no_descriptor_once_they_are_freed(client):
    gc.collect()  # what other tests left
    await client.put("p", KEYS, columns(0))
    views = [await client.get("p", KEYS, copy=False)]
    held = len(os.listdir("/proc/self/fd"))
    views += [await client.get("p", KEYS, copy=False) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == held
    views.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < held


async def test_every_flipped_bit_is_found_by_a_copying_read(client):
    """Also after the block was read before without fault; 1,000 flips anywhere in the blocks."""
    rng = random.Random(4)
    await client.put("p", KEYS, columns(0, width=200))
    located = await client.lookup("p", KEYS)
    memory = map_segment(located.units[0].directory, located.blocks[0].segment, write=True).data
    assert {block.segment for block in located.blocks} == {located.blocks[0].segment}
    await client.get("p", KEYS)
    for _ in range(1000):
        block = rng.choice(located.blocks)
        at, bit = block.offset + rng.randrange(block.nbytes), 1 << rng.randrange(8)
        memory[at] ^= bit
        with pytest.raises(Corrupt, match=f"block of '{block.field}'"):
            await client.get("p", rng.sample(KEYS, rng.randint(2, 8)), [block.field])
        memory[at] ^= bit
    await client.get("p", KEYS)


async def test_a_few_rows_of_a_large_block_are_checked_at_its_first_read(queue, client):
    await client.put("p", KEYS, columns(0))
    block = next(b for b in (await client.lookup("p", KEYS)).blocks if b.field == "dense")
    directory = (await client.lookup("p", KEYS)).units[0].directory
    map_segment(directory, block.segment, write=True).data[block.offset + block.nbytes - 1] ^= 1
    with pytest.raises(Corrupt):
        await queue.client("other").get("p", KEYS[:1], ["dense"])
