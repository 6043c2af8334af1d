"""What the training ranks agree on while they write one version together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Ranks(Protocol):
    rank: int
    world_size: int

    def added_up(self, numbers: Sequence[int]) -> list[int]:
        """Sums over all ranks, each below 2^63; no rank returns before all have called."""
        ...


class OneRank:
    rank, world_size = 0, 1

    def added_up(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)


class GroupRanks:
    """The ranks of this process' default group; numbers travel through host memory, beside any GPU."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def added_up(self, numbers: Sequence[int]) -> list[int]:
        import torch
        import torch.distributed as dist

        values = torch.tensor(numbers, dtype=torch.int64)
        if self.world_size > 1:
            dist.all_reduce(values)
        return [int(value) for value in values.tolist()]
