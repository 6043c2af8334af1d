"""From losses per token to one number, the same on any number of ranks and micro-batches. torch."""

from __future__ import annotations

from typing import Literal

import torch

AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


def aggregation_weights(
    mask: torch.Tensor,
    row: torch.Tensor,
    *,
    mode: AggregationMode,
    tokens: float,
    sequences: float,
    scale: float | None = None,
) -> torch.Tensor:
    """What each token counts in the loss: sum(weights * loss) over all ranks and micro-batches is the aggregate.

    `tokens` and `sequences` count what has mask 1 (rows with at least one such token) in the *global* mini-batch, so
    the result does not depend on how rows are split over ranks and micro-batches. A row is never split.

        token-mean               mask / tokens
        token-sum                mask
        seq-mean-token-sum       mask / sequences
        seq-mean-token-mean      mask / (tokens of its row) / sequences
        seq-mean-token-sum-norm  mask / sequences / scale        (Dr. GRPO, scale = the longest response allowed)

    Args: mask f[T]; row i64[T], the row of each token within this micro-batch. Returns f[T].
    """
    if mode == "token-mean":
        return mask / max(tokens, 1.0)
    if mode == "token-sum":
        return mask
    if mode == "seq-mean-token-sum":
        return mask / max(sequences, 1.0)
    if mode == "seq-mean-token-mean":
        rows = int(row.max()) + 1 if row.numel() else 0
        per_row = mask.new_zeros(rows).index_add_(0, row, mask).clamp(min=1.0)
        return mask / per_row[row] / max(sequences, 1.0)
    if mode == "seq-mean-token-sum-norm":
        if not scale:
            raise ValueError("loss_agg_mode=seq-mean-token-sum-norm needs loss_scale_factor > 0")
        return mask / max(sequences, 1.0) / scale
    raise ValueError(f"unknown loss_agg_mode {mode!r}; known: {', '.join(AggregationMode.__args__)}")
