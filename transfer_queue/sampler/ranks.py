"""Batches for the ranks of a data-parallel group: each rank gets its own, all processes of one rank the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from transfer_queue.sampler.balance import balanced_partitions
from transfer_queue.sampler.base import BaseSampler, Indexes, PartitionView, no_rows
from transfer_queue.sampler.grpo import GRPOGroupNSampler

_NEEDED = ("partition_id", "task_name", "dp_rank", "batch_index")


class _PerRank(BaseSampler):
    """Fetches of one (partition, task, dp_rank, batch_index) get one answer."""

    takes_arrays = True
    takes_oldest = True

    def cache_key(self, sampling_config: Mapping[str, Any]) -> str | None:
        rank, batch = sampling_config.get("dp_rank"), sampling_config.get("batch_index")
        if rank is None or batch is None:
            raise ValueError(f"{type(self).__name__} needs {', '.join(_NEEDED)} in the fetch's sampling_config")
        return rank_key(int(rank), int(batch))


class RankAwareSampler(_PerRank):
    """The oldest rows first; the processes of one data-parallel rank get the same ones."""

    def sample(
        self, ready_indexes: Any, batch_size: int, *args: Any, partition_id: str = "", task_name: str = "",
        dp_rank: int | None = None, batch_index: int | None = None, **kwargs: Any,
    ) -> tuple[Indexes, Indexes]:  # fmt: skip
        """Raises ValueError without dp_rank and batch_index."""
        key = self.cache_key({"dp_rank": dp_rank, "batch_index": batch_index})
        assert key is not None
        known = self.remembered(partition_id, task_name).get(key)
        if known is not None:
            return known, []
        if len(ready_indexes) < batch_size:
            return no_rows()
        sampled = ready_indexes[:batch_size]
        self.remember(partition_id, task_name, {key: sampled})
        return sampled, sampled


class SeqlenBalancedSampler(_PerRank):
    """Whole groups for all `dp_size` ranks at once, dealt out so that every rank gets `batch_size` rows of about equal
    cost: the tag `total_lengths` (or `length_tag`) of each."""

    def __init__(
        self, n_samples_per_prompt: int = 1, dp_size: int = 1, length_tag: str = "total_lengths",
        group_tag: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if dp_size < 1:
            raise ValueError(f"dp_size={dp_size}; expected at least 1")
        self._groups = GRPOGroupNSampler(n_samples_per_prompt, group_tag)
        self.dp_size = dp_size
        self.length_tag = length_tag

    def parameters(self) -> dict[str, Any]:
        return {**self._groups.parameters(), "dp_size": self.dp_size, "length_tag": self.length_tag}

    def sample(
        self, ready_indexes: Any, batch_size: int, *args: Any, partition: PartitionView | None = None,
        partition_id: str = "", task_name: str = "", dp_rank: int | None = None, batch_index: int | None = None,
        **kwargs: Any,
    ) -> tuple[Indexes, Indexes]:  # fmt: skip
        """Raises ValueError for a rank that is none, or a row without its length."""
        key = self.cache_key({"dp_rank": dp_rank, "batch_index": batch_index})
        assert key is not None
        assert dp_rank is not None
        assert batch_index is not None
        if not 0 <= dp_rank < self.dp_size:
            raise ValueError(f"dp_rank={dp_rank} of {self.dp_size} ranks")
        known = self.remembered(partition_id, task_name).get(key)
        if known is not None:
            return known, []
        chosen, _ = self._groups.sample(ready_indexes, batch_size * self.dp_size, partition=partition)
        if not len(chosen):
            return no_rows()
        shares = self._deal(np.asarray(chosen, np.int64), partition)
        answers = {rank_key(rank, batch_index): share for rank, share in enumerate(shares)}
        self.remember(partition_id, task_name, answers)
        return answers[key], chosen

    def _deal(self, chosen: np.ndarray, partition: PartitionView | None) -> list[np.ndarray]:
        if partition is None:
            raise ValueError(f"the tag {self.length_tag!r} of rows is known in the controller only")
        lengths = partition.tag_values(self.length_tag, chosen)
        if None in lengths:
            row = int(chosen[lengths.index(None)])
            raise ValueError(f"row {row} has no tag {self.length_tag!r}; put it, or use another sampler")
        parts = balanced_partitions([float(length) for length in lengths], self.dp_size, equal_size=True)
        return [chosen[part] for part in parts]


def rank_key(rank: int, batch_index: int) -> str:
    return f"{batch_index}/{rank}"
