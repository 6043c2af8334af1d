"""Whole groups of n rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from transfer_queue.sampler.base import BaseSampler, Indexes, PartitionView, no_rows


class GRPOGroupNSampler(BaseSampler):
    """`batch_size` rows that are whole groups of `n_samples_per_prompt`, the oldest first; none if there are too few.

    A group is n rows with the same `group_tag`; without one, n consecutive serials, which rows put in one call have.
    Groups that are put row by row, by several producers, need the tag: their serials interleave.
    """

    takes_arrays = True
    takes_oldest = True

    def __init__(self, n_samples_per_prompt: int = 1, group_tag: str | None = None) -> None:
        super().__init__()
        if n_samples_per_prompt < 1:
            raise ValueError(f"n_samples_per_prompt={n_samples_per_prompt}; expected at least 1")
        self.n_samples_per_prompt = n_samples_per_prompt
        self.group_tag = group_tag

    def parameters(self) -> dict[str, Any]:
        return {"n_samples_per_prompt": self.n_samples_per_prompt, "group_tag": self.group_tag}

    def sample(
        self, ready_indexes: Any, batch_size: int, *args: Any, partition: PartitionView | None = None, **kwargs: Any
    ) -> tuple[Indexes, Indexes]:
        """Raises ValueError if groups do not divide the batch."""
        n = self.n_samples_per_prompt
        if batch_size % n:
            raise ValueError(f"a batch of {batch_size} rows is not made of whole groups of {n}")
        ready = np.sort(np.asarray(ready_indexes, np.int64))
        if self.group_tag is None:
            groups = consecutive_groups(ready, n)
        else:
            if partition is None:
                raise ValueError(f"the tag {self.group_tag!r} of rows is known in the controller only")
            groups = tagged_groups(ready, partition.tag_values(self.group_tag, ready), n)
        if len(groups) < batch_size // n:
            return no_rows()
        sampled = groups[: batch_size // n].reshape(-1)
        return sampled, sampled


def consecutive_groups(ready: np.ndarray, n: int) -> np.ndarray:
    """Ascending serials as [groups, n], each n in a row, from the start of each run of consecutive ones."""
    if not len(ready):
        return np.empty((0, n), np.int64)
    begins = np.flatnonzero(np.diff(ready, prepend=ready[0] - 2) != 1)
    lengths = np.diff(begins, append=len(ready))
    place = np.arange(len(ready)) - np.repeat(begins, lengths)
    return ready[place < np.repeat(lengths // n * n, lengths)].reshape(-1, n)


def tagged_groups(ready: np.ndarray, names: list[Any], n: int) -> np.ndarray:
    """Serials as [groups, n] by equal names, groups in the order in which they became whole; None is no name."""
    rows: dict[Any, list[int]] = {}
    whole: list[list[int]] = []
    for serial, name in zip(ready.tolist(), names, strict=True):
        if name is not None:
            mine = rows.setdefault(name, [])
            mine.append(serial)
            if len(mine) == n:
                whole.append(rows.pop(name))
    return np.asarray(whole, np.int64).reshape(-1, n)
