"""A put is one copy and a get one gather: beside them, no memory of the size of the batch is ever taken."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

from transfer_queue.local import LocalQueue
from transfer_queue.storage.columns import Column

ROWS, WIDTH = 256, 8192
KEYS = [f"k{i}" for i in range(ROWS)]

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(WIDTH // 2, WIDTH, ROWS)
COLUMNS = {
    "dense": Column.dense(RNG.random((ROWS, WIDTH), dtype=np.float32)),
    "ragged": Column.from_packed(
        RNG.random(int(LENGTHS.sum()), dtype=np.float32), np.concatenate([[0], np.cumsum(LENGTHS)])
    ),
    "objects": Column.objects(["x" * 20_000 for _ in KEYS]),
}


@pytest.fixture
async def client():
    async with LocalQueue(unit_budget_bytes=256 << 20) as queue:
        yield queue.client("trainer")


async def taken(work: Awaitable[Any]) -> tuple[int, Any]:
    """Bytes that Python and numpy had at most beside what they had before, and the result."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = await work
        return tracemalloc.get_traced_memory()[1] - before, result
    finally:
        tracemalloc.stop()


async def put_parts(client, column: Column, parts: int) -> None:
    step = ROWS // parts
    for at in range(0, ROWS, step):
        await client.put("p", KEYS[at : at + step], {"x": column.view(at, at + step)})


@pytest.mark.parametrize("kind", COLUMNS)
async def test_a_put_takes_no_memory_of_its_own(client, kind):
    for _ in range(2):  # through the file, then through its mapping
        peak, _ = await taken(client.put("p", KEYS, {"x": COLUMNS[kind]}))
        assert peak < 1 << 20
        await client.clear("p", KEYS)


@pytest.mark.parametrize("order", ["in put order", "shuffled"])
@pytest.mark.parametrize("parts", [1, 4, ROWS])
@pytest.mark.parametrize("kind", COLUMNS)
async def test_a_get_takes_the_memory_of_its_result_and_no_more(client, kind, parts, order):
    await put_parts(client, COLUMNS[kind], parts)
    keys = list(KEYS)
    if order == "shuffled":
        random.Random(1).shuffle(keys)
    peak, got = await taken(client.get("p", keys))
    assert got["x"].values.nbytes == COLUMNS[kind].values.nbytes
    assert peak < 1.15 * got["x"].values.nbytes + (2 << 20)


async def test_a_view_takes_none(client):
    await put_parts(client, COLUMNS["dense"], 1)
    peak, got = await taken(client.get("p", KEYS, copy=False))
    assert np.array_equal(got["x"].values, COLUMNS["dense"].values)
    assert peak < 1 << 20
