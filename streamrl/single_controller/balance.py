"""What rows cost, and how they are shared evenly."""

from __future__ import annotations

from transfer_queue.sampler.balance import balanced_partitions

__all__ = ["LINEAR_COST", "balanced_partitions", "row_cost"]

LINEAR_COST = 24576
"""Per token, against length squared for attention: verl's figure for a 7B model. For shorter rows and smaller models
the cost is as good as linear."""


def row_cost(seq_len: int) -> int:
    """What a row of `seq_len` tokens costs in forward and backward, in arbitrary units."""
    return LINEAR_COST * seq_len + seq_len * seq_len
