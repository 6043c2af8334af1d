"""Policy-gradient losses per token, off-policy weights, and how tokens are averaged."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from streamrl.algorithms.kl import log_ratio

AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


class PolicyLoss(NamedTuple):
    """All f[T], unmasked. `clipped` and `clipped_lower` are 1 where the clip (the dual clip) decided the loss."""

    loss: torch.Tensor
    log_ratio: torch.Tensor
    clipped: torch.Tensor
    clipped_lower: torch.Tensor


def vanilla(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> PolicyLoss:
    """Clipped surrogate with dual clip, per token.

        r = exp(log_probs - old_log_probs)
        L = max(-A r, -A clip(r, 1 - low, 1 + high));  where A < 0:  L = min(L, -A c)

    The dual clip bounds what a token of negative advantage can cost when its ratio explodes, which the plain clip
    does not. It is no safeguard against stale samples: see optim.staleness_aware and actor.target_kl.

    Args: log_probs f[T] (with gradient), old_log_probs f[T], advantages f[T].

    Sources: PPO (arXiv:1707.06347) eq. 7; dual clip (arXiv:1912.09729) eq. 5; separate bounds: DAPO (arXiv:2503.14476).
    """
    log_r = log_ratio(log_probs, old_log_probs)
    ratio = log_r.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss = torch.maximum(plain, bounded)
    ceiling = -advantages * clip_ratio_c
    lower = (advantages < 0) & (loss > ceiling)
    return PolicyLoss(
        loss=torch.where(lower, ceiling, loss),
        log_ratio=log_r.detach(),
        clipped=(bounded > plain).to(loss.dtype),
        clipped_lower=lower.to(loss.dtype),
    )


POLICY_LOSSES = {"vanilla": vanilla}
"""`actor_rollout_ref.actor.policy_loss.loss_mode`."""


def importance_weights(
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, *, threshold: float | tuple[float, float] = 2.0
) -> torch.Tensor:
    """Token-level weights pi_old / pi_rollout, detached, f[T].

    A number truncates from above: min(w, threshold) (TIS; Ionides, "Truncated importance sampling", 2008). A pair
    (lo, hi) puts tokens outside of it to 0 (IcePop, arXiv:2510.18855).
    """
    weights = log_ratio(old_log_probs.detach(), rollout_log_probs).exp()
    if isinstance(threshold, tuple):
        low, high = threshold
        return torch.where((weights < low) | (weights > high), torch.zeros_like(weights), weights)
    return weights.clamp(max=threshold)


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
