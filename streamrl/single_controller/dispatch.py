"""Splitting a batch of references over data-parallel ranks.

Rows are split freely (a group may be spread over ranks): losses are normalised over the global mini-batch, and
advantages were computed before. What has to be balanced is each mini-batch by itself, since all ranks take each
optimizer step together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamrl.single_controller.balance import balanced_partitions, row_cost
from transfer_queue.keys import split_row_key
from transfer_queue.metadata import KVBatchMeta

MINI_BATCH = "mini_batch"
"""In `extra_info` of a rank's share: {key: index of its mini-batch}."""
MINI_BATCHES = "mini_batches"
"""In `extra_info` of every share: how many mini-batches the whole batch has."""


def mini_batch_indices(keys: Sequence[str], prompts: int) -> list[int]:
    """The mini-batch of each row: `prompts` prompt groups each, in order of first appearance.

    Counts prompts, never rows, so the number of optimizer steps does not depend on how many rows came back.
    """
    order: dict[str, int] = {}
    for key in keys:
        order.setdefault(split_row_key(key).uid, len(order))
    return [order[split_row_key(key).uid] // prompts for key in keys]


def split_batch(batch: KVBatchMeta, parts: int) -> list[KVBatchMeta]:
    """One share per rank, balanced by the tag `seq_len` within each mini-batch; the order of rows is kept.

    `extra_info["mini_batch_size"]` is in prompts (absent: one mini-batch). Values of `extra_info` that are dicts with
    the row keys as keys (advantages) are narrowed to the share. A share may be empty.
    """
    info = dict(batch.extra_info or {})
    prompts = info.get("mini_batch_size")
    index = mini_batch_indices(batch.keys, int(prompts)) if prompts else [0] * len(batch.keys)
    info[MINI_BATCH] = dict(zip(batch.keys, index, strict=True))
    info[MINI_BATCHES] = max(index, default=-1) + 1
    costs = [row_cost(_seq_len(key, tag)) for key, tag in zip(batch.keys, batch.tags, strict=True)]
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for mini_batch in range(info[MINI_BATCHES]):
        rows = [i for i, m in enumerate(index) if m == mini_batch]
        for rank, share in enumerate(balanced_partitions([costs[i] for i in rows], parts)):
            chosen[rank] += [rows[i] for i in share]
    return [_share(batch, sorted(rows), info) for rows in chosen]


def _share(batch: KVBatchMeta, rows: list[int], info: dict[str, Any]) -> KVBatchMeta:
    keys, tags = [batch.keys[i] for i in rows], [batch.tags[i] for i in rows]
    whole = set(batch.keys)
    narrowed = {
        name: {key: value[key] for key in keys}
        if isinstance(value, dict) and value and value.keys() == whole
        else value
        for name, value in info.items()
    }
    return KVBatchMeta(keys, tags, batch.partition_id, batch.fields, narrowed, batch.token)


def _seq_len(key: str, tag: dict[str, Any]) -> int:
    if "seq_len" not in tag:
        raise ValueError(f"row {key} has no tag seq_len, by which ranks are balanced; its tags: {sorted(tag)}")
    return int(tag["seq_len"])
