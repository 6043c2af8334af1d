"""Correcting for the policy that sampled being another than the old policy. torch.

    rejection_mask      which tokens and rows are too far off to learn from; they leave `loss_mask`
    importance_weights  what the loss of the others is multiplied by
    weight_sums, normalised   so that the weights' mean over the mini-batch is 1, in two halves

Both policies' log-probs are known before a mini-batch is trained. Reject first, for the whole mini-batch: what is
rejected must be in no denominator. Weights are computed with the mask as it was before (the ratio of a row is that of
all it sampled), and normalised over the mask that is left.

Per-token tensors are flat [T], `row` i64[T] says whose token each is; all of a row's tokens are together, and every
result is per row, so none depends on how rows are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from streamrl.algorithms.kl import LOG_RATIO_LIMIT, kl_estimator, log_ratio
from streamrl.algorithms.thresholds import RejectionRule

Level = Literal["token", "sequence"]


class Rejection(NamedTuple):
    mask: torch.Tensor
    """f[T]: the given mask without what was rejected."""
    rejected: dict[str, torch.Tensor]
    """Statistic → f[T], 1 at the tokens with mask 1 that it rejected."""


def rejection_mask(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    row: torch.Tensor,
    rules: Sequence[RejectionRule],
) -> Rejection:
    """Keeps tokens that satisfy every rule (`thresholds.rejection_rules`).

    With r = pi_old / pi_rollout per token:  k1 = -log r,  k2 = (log r)^2 / 2,  k3 = r - 1 - log r, and

        token_k    the token's own                    seq_sum_k   sum over the row's tokens with mask 1
        seq_mean_k mean over them (k1: geometric)     seq_max_k   maximum over them

    `seq_` rules keep or reject whole rows. Every rule sees the mask as given, not what another rule left of it.

    Sources: Liu, Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (2025), masked importance sampling; names as in verl.
    """
    old, rollout = old_log_probs.detach(), rollout_log_probs.detach()
    kept, rejected = mask.clone(), {}
    for rule in rules:
        value = kl_estimator(rule.estimator)(rollout, old)
        if rule.scope != "token":
            value = of_row(rule.scope, value, mask, row)[row]
        out = ((value < rule.low) | (value > rule.high) | value.isnan()) & (mask > 0)
        rejected[rule.statistic] = out.to(mask.dtype)
        kept = torch.where(out, torch.zeros_like(kept), kept)
    return Rejection(kept, rejected)


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

    A number truncates from above: min(w, threshold). A pair (low, high) puts w outside of it to 0 (IcePop).

    In bypass mode with plain REINFORCE (policy loss `gpg`), pass the current log-probs as `old_log_probs`.

    Sources: Ionides, "Truncated importance sampling" (2008); IcePop (arXiv:2510.18855).
    """
    ratios = importance_ratios(old_log_probs, rollout_log_probs, mask, row, level=level)
    return bounded(ratios, threshold)


def importance_ratios(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    row: torch.Tensor,
    *,
    level: Level = "token",
) -> torch.Tensor:
    """f[T]: the weights before any threshold, detached."""
    old, rollout = old_log_probs.detach(), rollout_log_probs.detach()
    if level == "token":
        logs = log_ratio(old, rollout)
    elif level == "sequence":
        logs = of_row("seq_sum", old - rollout, mask, row)[row].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    else:
        raise ValueError(f"unknown rollout_is {level!r}; known: token, sequence")
    return logs.exp()


def bounded(ratios: torch.Tensor, threshold: float | tuple[float, float]) -> torch.Tensor:
    """f[T]: truncated from above by a number; 0 outside of a pair."""
    if isinstance(threshold, tuple):
        low, high = threshold
        return torch.where((ratios < low) | (ratios > high), torch.zeros_like(ratios), ratios)
    return ratios.clamp(max=threshold)


def weight_sums(weights: torch.Tensor, mask: torch.Tensor, row: torch.Tensor, *, level: Level) -> torch.Tensor:
    """f64[2]: sum and number of the weights that count; of tokens, or with level=sequence of rows with a token that
    counts. Additive over micro-batches and ranks."""
    if level == "sequence":
        tokens = of_row("seq_sum", mask, mask, row)
        weights, mask = of_row("seq_mean", weights, mask, row), (tokens > 0).to(mask.dtype)
    return torch.stack([(weights * mask).sum(), mask.sum()]).double()


def normalised(weights: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """f[T]: weights / their mean, `sums` being those of the mini-batch (`rollout_is_batch_normalize`). Weights that are
    all 0 stay 0."""
    total, count = float(sums[0]), float(sums[1])
    return weights * (count / total) if total > 0 else weights


def of_row(scope: str, values: torch.Tensor, mask: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """f[B]: sum, mean or maximum over the row's tokens with mask 1; 0 for a row without."""
    rows = int(row.max()) + 1 if row.numel() else 0
    counting = mask > 0
    if scope == "seq_max":
        kept = values.masked_fill(~counting, -torch.inf)
        found = values.new_full((rows,), -torch.inf).scatter_reduce_(0, row, kept, "amax")
        return found.masked_fill(found == -torch.inf, 0.0)
    total = values.new_zeros(rows).index_add_(0, row, torch.where(counting, values, torch.zeros_like(values)))
    if scope == "seq_sum":
        return total
    return total / values.new_zeros(rows).index_add_(0, row, counting.to(values.dtype)).clamp(min=1.0)
