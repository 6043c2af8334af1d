"""Per-token estimates of KL(policy || reference) from the log-probs of sampled tokens. torch.

With r = p_ref/p and samples from the policy (Schulman, "Approximating KL divergence", 2020). Every estimator takes
log_probs f[T] (with gradient, in a loss) and ref_log_prob f[T], and gives f[T].

As a loss, an estimator's gradient is what counts: that of k1 is 0 in expectation, that of k3 is of the reverse
divergence; only k2's is that of KL(policy || reference). `name+` has the value of `name` and the gradient of k2
(straight-through).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

KLEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 4.9e8 is beyond any useful ratio and far from overflow in float32."""


def log_ratio(log_probs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """log(p/p_other) f[T], clamped so that its exponential stays finite."""
    return (log_probs - other).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k1(log_probs: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
    """-log r: unbiased, high variance."""
    return log_probs - ref_log_prob


def absolute(log_probs: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
    """|log r|: how far, in either direction; no estimate of the KL."""
    return (log_probs - ref_log_prob).abs()


def k2(log_probs: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
    """(log r)^2 / 2: biased, low variance. Its gradient is that of the KL itself."""
    return 0.5 * (log_probs - ref_log_prob).square()


def k3(log_probs: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r: unbiased, low variance, >= 0. log r is bounded to +-20."""
    log_r = log_ratio(ref_log_prob, log_probs)
    return log_r.exp() - 1.0 - log_r


def straight_through(estimate: KLEstimator) -> KLEstimator:
    """The value of `estimate` with the gradient of k2."""

    def forward(log_probs: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
        gradient = k2(log_probs, ref_log_prob)
        return estimate(log_probs, ref_log_prob).detach() + (gradient - gradient.detach())

    return forward


_PLAIN: dict[str, KLEstimator] = {
    "k1": k1,
    "kl": k1,
    "abs": absolute,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
}

KL_ESTIMATORS: dict[str, KLEstimator] = _PLAIN | {f"{name}+": straight_through(each) for name, each in _PLAIN.items()}
"""`actor_rollout_ref.actor.kl_loss_type` and `algorithm.kl_penalty`, with verl's names beside the short ones."""


def kl_estimator(name: str) -> KLEstimator:
    """Of KL_ESTIMATORS. Raises ValueError for an unknown name."""
    if name not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {name!r}; known: {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[name]
