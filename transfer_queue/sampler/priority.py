"""Rows by a tag that says how much they matter."""

from __future__ import annotations

from typing import Any

import numpy as np

from transfer_queue.sampler.base import BaseSampler, Indexes, PartitionView, no_rows


class PrioritySampler(BaseSampler):
    """The highest `tag` first, of equal ones the oldest. A row without it counts as `default`."""

    takes_arrays = True

    def __init__(self, tag: str = "priority", default: float = 0.0) -> None:
        super().__init__()
        self.tag, self.default = tag, default

    def parameters(self) -> dict[str, Any]:
        return {"tag": self.tag, "default": self.default}

    def sample(
        self, ready_indexes: Any, batch_size: int, *args: Any, partition: PartitionView | None = None, **kwargs: Any
    ) -> tuple[Indexes, Indexes]:
        ready = np.asarray(ready_indexes, np.int64)
        if len(ready) < batch_size:
            return no_rows()
        best = highest(_numbers(self.tag, self.default, ready, partition), batch_size)
        return ready[best], ready[best]


class WeightedSampler(BaseSampler):
    """At random without repetition, the chance of a row being its `tag` (a weight, not negative; missing: `default`).

    By the keys u^(1/w) of Efraimidis and Spirakis (2006). Rows of weight 0 are never taken.
    """

    takes_arrays = True

    def __init__(self, tag: str = "weight", default: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        self.tag, self.default, self.seed = tag, default, seed
        self._random = np.random.default_rng(seed)

    def parameters(self) -> dict[str, Any]:
        return {"tag": self.tag, "default": self.default, "seed": self.seed}

    def sample(
        self, ready_indexes: Any, batch_size: int, *args: Any, partition: PartitionView | None = None, **kwargs: Any
    ) -> tuple[Indexes, Indexes]:
        """Raises ValueError for a negative weight."""
        ready = np.asarray(ready_indexes, np.int64)
        weights = _numbers(self.tag, self.default, ready, partition)
        if (weights < 0).any():
            row = int(np.argmax(weights < 0))
            raise ValueError(f"row {ready[row]} has {self.tag}={weights[row]}; weights are not negative")
        ready, weights = ready[weights > 0], weights[weights > 0]
        if len(ready) < batch_size:
            return no_rows()
        keys = np.log(self._random.random(len(ready))) / weights
        best = highest(keys, batch_size)
        return ready[best], ready[best]


def _numbers(tag: str, default: float, ready: np.ndarray, partition: PartitionView | None) -> np.ndarray:
    if partition is None:
        raise ValueError(f"the tag {tag!r} of rows is known in the controller only")
    values = partition.tag_numbers(tag, ready)
    return np.where(np.isnan(values), default, values)


def highest(values: np.ndarray, count: int) -> np.ndarray:
    """Where the highest `count` (at least 1, at most all) are: the highest first, of equal ones the first. O(n)."""
    least = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > least)
    found = np.concatenate([above, np.flatnonzero(values == least)[: count - len(above)]])
    return found[np.argsort(-values[found], kind="stable")]
