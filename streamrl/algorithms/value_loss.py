"""The critic's loss. torch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ValueLoss(NamedTuple):
    """f[T], unmasked. `clipped` is 1 where the clip decided the loss (`critic/vf_clipfrac`)."""

    loss: torch.Tensor
    clipped: torch.Tensor


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, cliprange_value: float = 0.5
) -> ValueLoss:
    """Squared error, no smaller than that of values kept near those before the update.

        L = 1/2 max((V - R)^2, (clip(V, V_old - cliprange_value, V_old + cliprange_value) - R)^2)

    Args: values f[T] (with gradient), old_values f[T] (of the rollout's `values` column), returns f[T].

    Source: Huang et al., "The 37 Implementation Details of PPO" (2022), detail 9; Schulman et al.'s PPO2 code.
    """
    near = torch.maximum(torch.minimum(values, old_values + cliprange_value), old_values - cliprange_value)
    plain, bounded = (values - returns).square(), (near - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, bounded), (bounded > plain).to(plain.dtype))
