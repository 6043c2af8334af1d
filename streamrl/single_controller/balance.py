"""Sharing work evenly. Pure functions."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

LINEAR_COST = 24576
"""Per token, against length squared for attention: verl's figure for a 7B model. For shorter rows and smaller models
the cost is as good as linear."""


def row_cost(seq_len: int) -> int:
    """What a row of `seq_len` tokens costs in forward and backward, in arbitrary units."""
    return LINEAR_COST * seq_len + seq_len * seq_len


def balanced_partitions(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices of `costs` in `parts` lists of about equal cost: the largest first, each to the least loaded.

    The largest list costs at most 4/3 of the best possible (Graham 1969). Ties go to the lower part, and each
    list is in ascending order, so the result depends on the costs only. Lists may be empty.
    """
    if parts < 1:
        raise ValueError(f"balanced_partitions: {parts} parts; at least 1 is needed")
    result: list[list[int]] = [[] for _ in range(parts)]
    load: list[tuple[float, int]] = [(0.0, part) for part in range(parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, part = heapq.heappop(load)
        result[part].append(index)
        heapq.heappush(load, (total + costs[index], part))
    return [sorted(part) for part in result]
