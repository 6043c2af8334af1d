"""Bulk: a batch is put, read in several ways, and cleared."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from benchmarks.bars import Bar
from benchmarks.queue.data import Batch, complex_batch, dense_batch, ragged_batch
from benchmarks.queue.workload import Figures, Workload

GIB = 1 << 30


@lru_cache(maxsize=1)
def batch_of(name: str, quick: bool, seed: int) -> Batch:
    match name:
        case "dense":
            return dense_batch(64 if quick else 1024, 9, 256 if quick else 8192, seed)
        case "complex":
            return complex_batch(64 if quick else 1024, 256 if quick else 8192, seed)
        case "verl":
            return ragged_batch(64 if quick else 1024, 256, 1024, seed)
        case _:
            return ragged_batch(128 if quick else 4096, 16, 64, seed)


def one_round(name: str, driver: Any, quick: bool, seed: int) -> dict[str, float]:
    """put; get of the tensor columns in put order with the result freed, again shuffled with the results kept, and of
    all columns; clear. Beside the seconds, `bytes` of the batch."""
    batch = batch_of(name, quick, seed)
    shuffled = list(batch.keys)
    random.Random(seed).shuffle(shuffled)
    partition = f"bulk-{name}"
    figures = {"bytes": float(batch.nbytes), "put": _seconds(lambda: driver.put(batch, partition))}
    figures["get tensors, first read"] = _seconds(lambda: driver.get(batch, partition, batch.keys, batch.tensors))
    figures["get tensors"] = _seconds(lambda: driver.get(batch, partition, batch.keys, batch.tensors))
    kept: list[Any] = []
    figures["get tensors, shuffled, kept"] = _seconds(
        lambda: kept.append(driver.get(batch, partition, shuffled, batch.tensors))
    )
    if hasattr(driver, "view"):
        figures["get tensors as views"] = _seconds(lambda: driver.view(batch, partition, batch.keys, batch.tensors))
    if batch.objects:
        figures["get all"] = _seconds(lambda: driver.get(batch, partition, batch.keys, None))
    figures["clear"] = _seconds(lambda: driver.clear(batch.keys, partition))
    return figures


def _seconds(work: Callable[[], Any]) -> float:
    """The result is freed after the clock has stopped."""
    began = time.perf_counter()
    result = work()
    ended = time.perf_counter()
    del result
    return ended - began


def dense_bars(figures: Figures) -> list[Bar]:
    nbytes = figures.first("ours", "bytes")
    put, get = (figures.median("memcpy", n) / figures.median("ours", n) for n in ("put", "get tensors"))
    return [
        Bar("dense: put, share of warm memcpy", put, "ratio", 0.4),
        Bar("dense: first put", nbytes / figures.first("ours", "put") / GIB, "GiB/s", 1.5),
        Bar("dense: get, share of allocate-and-copy", get, "ratio", 0.6),
        Bar("dense: get as views", 1e3 * figures.median("ours", "get tensors as views"), "ms", 5.0, "at most"),
        *against_peer("dense", figures, {}),
    ]  # fmt: skip


def object_bars(name: str, put: float, ordered: float, shuffled: float | None, figures: Figures) -> list[Bar]:
    share = figures.median("ours", "get all") / figures.median("memcpy", "get all")
    wanted = {"put": put, "get tensors": ordered, "get tensors, shuffled, kept": shuffled}
    return [
        Bar(f"{name}: get all, of wrapping the objects and copying", share, "ratio", 1.5, "at most"),
        *against_peer(name, figures, wanted),
    ]


def complex_bars(figures: Figures) -> list[Bar]:
    return against_peer("complex", figures, {})


def against_peer(name: str, figures: Figures, wanted: dict[str, float | None]) -> list[Bar]:
    """How many times faster than the peer, for each figure that both have; nothing without a peer."""
    return [
        Bar(f"{name}: {what}, times faster than the peer", figures.median("peer", what) / figures.median("ours", what),
            "ratio", wanted.get(what))
        for what in figures.rounds.get("peer", {})
        if what != "bytes"
    ]  # fmt: skip


WORKLOADS = [
    Workload("dense", partial(one_round, "dense"), dense_bars),
    Workload("complex", partial(one_round, "complex"), complex_bars),
    Workload("verl", partial(one_round, "verl"), partial(object_bars, "verl", 20.0, 20.0, 12.0), rounds=9),
    Workload("short", partial(one_round, "short"), partial(object_bars, "short", 40.0, 40.0, None), rounds=9),
]
