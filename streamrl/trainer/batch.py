"""From leased groups to the references that the ranks get: keys, tags and one advantage per row.

Only scalars pass here (scores, lengths, versions); the tokens stay in the queue.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamrl.algorithms.advantages import estimator as advantage_estimator
from streamrl.trainer.replay_buffer import LeasedBatch
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.net.messages import Group


def group_advantages(groups: list[Group], estimator: str, *, norm_by_std: bool) -> dict[str, float]:
    """One value per session, over the sessions of each group; every row of a session gets the session's advantage.

    A session with several rows has one score: that of its last row (the outcome).
    """
    scores: list[float] = []
    index: list[int] = []
    members: list[list[str]] = []
    for number, group in enumerate(groups):
        sessions: dict[int, list[tuple[str, float]]] = {}
        for row in group.rows:
            sessions.setdefault(int(row.tag["session"]), []).append((row.key, float(row.tag["score"])))
        for rows in sessions.values():
            scores.append(rows[-1][1])
            index.append(number)
            members.append([key for key, _ in rows])
    found = advantage_estimator(estimator)
    values = found.sessions(np.asarray(scores, np.float64), np.asarray(index, np.int64), norm_by_std=norm_by_std)
    return {key: float(value) for value, keys in zip(values, members, strict=True) for key in keys}


def batch_meta(batch: LeasedBatch, partition: str, extra_info: dict[str, Any]) -> KVBatchMeta:
    """References to all rows of the batch, in dispatch order."""
    rows = [row for group in batch.groups for row in group.rows]
    meta = KVBatchMeta(
        keys=[row.key for row in rows],
        tags=[dict(row.tag) for row in rows],
        partition_id=partition,
        extra_info=extra_info,
    )
    meta.token = batch.token
    return meta


def score_metrics(groups: list[Group], version: int) -> dict[str, float]:
    """Scalars of the rows that a step trained at weights `version`, under verl's names."""
    tags = [row.tag for group in groups for row in group.rows]

    def column(name: str) -> np.ndarray:
        return np.array([float(tag[name]) for tag in tags])

    lengths, prompts = column("response_len"), column("prompt_len")
    oldest, newest = column("min_global_steps"), column("max_global_steps")
    scores = [np.array([float(row.tag["score"]) for row in group.rows]) for group in groups]
    found = {
        "perf/total_num_tokens": float(lengths.sum() + prompts.sum()),
        "rows/trained": float(len(tags)),
        "groups/trained": float(len(groups)),
        "groups/zero_variance": float(sum(np.ptp(each) < 1e-9 for each in scores)),
    }
    for name, values in (
        ("critic/score", np.concatenate(scores)),
        ("response_length", lengths),
        ("prompt_length", prompts),
        ("training/off_policy/trajectory_staleness", version - newest),
        ("training/off_policy/trajectory_staleness_worst", version - oldest),
        ("training/off_policy/trajectory_spans", newest - oldest),
    ):
        found |= {f"{name}/{stat}": float(getattr(values, stat)()) for stat in ("mean", "max", "min")}
    return found
