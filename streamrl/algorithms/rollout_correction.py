"""Correcting for the policy that sampled being another than the old policy. torch.

Per-token tensors are flat [T], `row` i64[T] says whose token each is; all of a row's tokens are together.
"""

from __future__ import annotations

from typing import Literal

import torch

from streamrl.algorithms.kl import LOG_RATIO_LIMIT, log_ratio

Level = Literal["token", "sequence"]


def importance_weights(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    row: torch.Tensor,
    *,
    level: Level = "token",
    threshold: float | tuple[float, float] = 2.0,
) -> torch.Tensor:
    """What each token's loss is multiplied by, detached, f[T].

        token     w_t = pi_old(t) / pi_rollout(t)
        sequence  w_t = product of those over the row's tokens with mask 1, the same for the whole row

    A number truncates from above: min(w, threshold). A pair (lo, hi) puts w outside of it to 0 (IcePop).

    Sources: Ionides, "Truncated importance sampling" (2008); IcePop (arXiv:2510.18855).
    """
    logs = log_ratio(old_log_probs.detach(), rollout_log_probs)
    if level == "sequence":
        logs = row_sum(old_log_probs.detach() - rollout_log_probs, mask, row)[row].clamp(
            -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
        )
    elif level != "token":
        raise ValueError(f"unknown rollout_is {level!r}; known: token, sequence")
    weights = logs.exp()
    if isinstance(threshold, tuple):
        low, high = threshold
        return torch.where((weights < low) | (weights > high), torch.zeros_like(weights), weights)
    return weights.clamp(max=threshold)


def parse_threshold(value: float | str) -> float | tuple[float, float]:
    """`rollout_is_threshold`: a number, or "low_high" → (low, high). Raises ValueError."""
    try:
        if isinstance(value, str) and "_" in value:
            low, high = map(float, value.split("_"))
            if 0 <= low < high:
                return low, high
        elif (number := float(value)) > 0:
            return number
    except ValueError:
        pass
    raise ValueError(f"threshold {value!r}: expected a number above 0 or 'low_high' with 0 <= low < high, e.g. 0.5_5.0")


def row_sum(values: torch.Tensor, mask: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """f[B]: of each row, the sum over its tokens with mask 1."""
    rows = int(row.max()) + 1 if row.numel() else 0
    kept = torch.where(mask > 0, values, torch.zeros_like(values))
    return values.new_zeros(rows).index_add(0, row, kept)
