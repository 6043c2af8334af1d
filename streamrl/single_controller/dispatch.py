"""Splitting a batch of references over data-parallel ranks.

Sessions are split freely (a group may be spread over ranks): losses are normalised over the global mini-batch, and
advantages were computed before. The rows of a session stay together, since they are one sequence to the loss. What
has to be balanced is each mini-batch by itself, since all ranks take each optimizer step together.
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
    return shares_of(batch, balanced_rows(batch, parts))


def balanced_rows(batch: KVBatchMeta, parts: int) -> list[list[int]]:
    """The rows of each share, ascending, by `split_batch`'s rule."""
    index = _mini_batches(batch)
    sessions: dict[tuple[int, str, int], list[int]] = {}  # rows of each, by mini-batch, prompt and session
    for row, key in enumerate(batch.keys):
        name = split_row_key(key)
        sessions.setdefault((index[row], name.uid, name.session), []).append(row)
    costs = [row_cost(_seq_len(key, tag)) for key, tag in zip(batch.keys, batch.tags, strict=True)]
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for mini_batch in range(max(index, default=-1) + 1):
        here = [rows for (number, _, _), rows in sessions.items() if number == mini_batch]
        shares = balanced_partitions([sum(costs[row] for row in rows) for rows in here], parts)
        for part, share in enumerate(shares):
            chosen[part] += [row for i in share for row in here[i]]
    return [sorted(rows) for rows in chosen]


def shares_of(batch: KVBatchMeta, rows: Sequence[Sequence[int]]) -> list[KVBatchMeta]:
    """The batch cut into these rows, each share with its `MINI_BATCH` and the whole's `MINI_BATCHES`."""
    info, index = dict(batch.extra_info or {}), _mini_batches(batch)
    info[MINI_BATCH] = dict(zip(batch.keys, index, strict=True))
    info[MINI_BATCHES] = max(index, default=-1) + 1
    return [_share(batch, list(chosen), info) for chosen in rows]


def joined(shares: Sequence[KVBatchMeta]) -> KVBatchMeta:
    """The inverse of `shares_of` for what methods return: all rows, the values per row of `extra_info` united.

    Raises ValueError if shares contradict each other in fields, partition or another value of `extra_info`.
    """
    per_row: dict[str, dict[str, Any]] = {}
    plain: list[KVBatchMeta] = []
    for share in shares:
        info = {k: v for k, v in (share.extra_info or {}).items() if k not in (MINI_BATCH, MINI_BATCHES)}
        for name in [k for k, v in info.items() if isinstance(v, dict) and v.keys() == set(share.keys)]:
            per_row.setdefault(name, {}).update(info.pop(name))
        plain.append(KVBatchMeta(share.keys, share.tags, share.partition_id, share.fields, info, share.token))
    whole = KVBatchMeta.concat(plain)
    whole.extra_info = {**(whole.extra_info or {}), **{name: value for name, value in per_row.items() if value}}
    return whole


def _mini_batches(batch: KVBatchMeta) -> list[int]:
    prompts = (batch.extra_info or {}).get("mini_batch_size")
    return mini_batch_indices(batch.keys, int(prompts)) if prompts else [0] * len(batch.keys)


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
