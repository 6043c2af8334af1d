"""Per-token estimates of KL(policy || reference) from the log-probs of sampled tokens.

With r = p_ref/p and samples from the policy (Schulman, "Approximating KL divergence", 2020):
k1 = -log r, unbiased, high variance; k2 = (log r)^2 / 2, biased, low variance; k3 = r - 1 - log r, unbiased, >= 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 4.9e8 is beyond any useful ratio and far from overflow in float32."""


def log_ratio(log_probs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """log(p/p_other) f[T], clamped so that its exponential stays finite."""
    return (log_probs - other).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k1(log_probs: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
    """f[T] -> f[T]."""
    return log_probs - ref_log_prob


def k2(log_probs: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
    """f[T] -> f[T]. Its gradient is that of the KL itself."""
    return 0.5 * (log_probs - ref_log_prob).square()


def k3(log_probs: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
    """f[T] -> f[T]."""
    log_r = log_ratio(ref_log_prob, log_probs)
    return log_r.exp() - 1.0 - log_r


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "kl": k1,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
}
"""`actor_rollout_ref.actor.kl_loss_type`, with verl's names beside the short ones."""
