"""How far the policy that sampled is from the one that is trained, and how uneven the weights are that make up for it.

    policy_gap     of two policies' log-probs of the same tokens
    weight_spread  of importance weights

Each gives the figures of one part of a mini-batch so that parts can be put together: `sums` add up, of `peaks` the
largest counts (the smallest of something is the peak of its negative). What comes out is the same for any cut into
micro-batches and ranks. Per-token tensors are flat [T], `row` i64[T] says whose token each is; all of a row's tokens
are together. Everything is computed in float64 and without gradient. torch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from streamrl.algorithms.kl import LOG_RATIO_LIMIT
from streamrl.algorithms.rollout_correction import of_row


class Figures(NamedTuple):
    sums: dict[str, torch.Tensor]
    """Scalars."""
    peaks: dict[str, torch.Tensor]
    """Scalars; -inf where nothing counts."""


def policy_gap(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor, row: torch.Tensor
) -> Figures:
    """Over tokens with mask 1 and rows with such a token.

    With r_t = pi(t) / pi_rollout(t), and for a row the means l = mean_t log pi(t), q = mean_t log pi_rollout(t):

        rollout_kl, rollout_k3_kl     of a token: -log r_t, and r_t - 1 - log r_t; estimates of KL(rollout || pi)
        rollout_chi2_token            of a token: r_t^2 - 1; its mean is the variance of the weights r_t
        rollout_probs_diff            of a token: |pi(t) - pi_rollout(t)|; `_squared` its square
        probs, rollout_probs          of a token: pi(t), pi_rollout(t); `_squared` their squares, probs_product both
        rollout_chi2_seq              of a row: (product of r_t)^2 - 1
        training_ppl, rollout_ppl     of a row: exp(-l), exp(-q); `_log_ppl` without the exponential
        log_ppl_diff                  of a row: q - l; `_abs_` its absolute value, ppl_ratio its exponential
        rollout_rows                  how many rows count

    Peaks: rollout_probs_diff, log_ppl_diff, and log_ppl_diff_low, the largest of l - q. Exponents are bounded to +-20
    as everywhere (those of squared ratios to +-40).

    Source: the figures and their names are those of verl's rollout correction.
    """
    new, old, counts = (values.detach().double() for values in (log_probs, rollout_log_probs, mask))
    kept = counts > 0
    logs = torch.where(kept, new - old, torch.zeros_like(new))
    ratio = logs.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    difference = torch.where(kept, (new.exp() - old.exp()).abs(), torch.zeros_like(new))
    probs, rollout_probs = (torch.where(kept, logs.exp(), torch.zeros_like(logs)) for logs in (new, old))
    rows = of_row("seq_sum", counts, counts, row) > 0
    training, rollout = (of_row("seq_mean", -values, counts, row)[rows] for values in (new, old))
    gap = training - rollout
    product = of_row("seq_sum", logs, counts, row)[rows].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    sums = {
        "rollout_kl": -ratio.sum(),
        "rollout_k3_kl": (ratio.exp() - 1.0 - ratio).sum(),
        "rollout_chi2_token": ((2.0 * ratio).exp() - 1.0).sum(),
        "rollout_probs_diff": difference.sum(),
        "rollout_probs_diff_squared": difference.square().sum(),
        "probs": probs.sum(),
        "probs_squared": probs.square().sum(),
        "rollout_probs": rollout_probs.sum(),
        "rollout_probs_squared": rollout_probs.square().sum(),
        "probs_product": (probs * rollout_probs).sum(),
        "rollout_chi2_seq": ((2.0 * product).exp() - 1.0).sum(),
        "training_ppl": _exp(training).sum(),
        "rollout_ppl": _exp(rollout).sum(),
        "training_log_ppl": training.sum(),
        "rollout_log_ppl": rollout.sum(),
        "log_ppl_diff": gap.sum(),
        "log_ppl_abs_diff": gap.abs().sum(),
        "ppl_ratio": _exp(gap).sum(),
        "rollout_rows": rows.sum(),
    }
    peaks = {"rollout_probs_diff": difference[kept], "log_ppl_diff": gap, "log_ppl_diff_low": -gap}
    return Figures(sums, {name: _peak(values) for name, values in peaks.items()})


def weight_spread(
    weights: torch.Tensor,
    ratios: torch.Tensor,
    mask: torch.Tensor,
    row: torch.Tensor,
    *,
    threshold: float | tuple[float, float],
) -> Figures:
    """Of the weights that the loss is multiplied by, over tokens with mask 1; of rows, their mean weight.

    `ratios` f[T] are the weights before they were bounded by `threshold`, which is (low, high) or high alone; low is
    then 1 / high. Of both tokens and rows there are number, sum and sum of squares (from which follow mean, deviation
    and effective sample size), the extremes, and how many are above high and below low: of tokens their ratio, of rows
    their mean weight.

    Names: is_tokens, is_sum, is_squares, is_high, is_low; the same with is_seq_, and is_rows. Peaks: is_max, is_min (of
    the negative), is_seq_max, is_seq_min, is_seq_deviation (from 1).
    """
    low, high = threshold if isinstance(threshold, tuple) else (1.0 / threshold, threshold)
    weights, ratios, counts = (values.detach().double() for values in (weights, ratios, mask))
    kept = counts > 0
    rows = of_row("seq_sum", counts, counts, row) > 0
    of_rows, weights, ratios = of_row("seq_mean", weights, counts, row)[rows], weights[kept], ratios[kept]
    sums = {
        "is_tokens": kept.sum(),
        "is_sum": weights.sum(),
        "is_squares": weights.square().sum(),
        "is_high": (ratios > high).sum(),
        "is_low": (ratios < low).sum(),
        "is_rows": rows.sum(),
        "is_seq_sum": of_rows.sum(),
        "is_seq_squares": of_rows.square().sum(),
        "is_seq_high": (of_rows > high).sum(),
        "is_seq_low": (of_rows < low).sum(),
    }
    peaks = {
        "is_max": weights,
        "is_min": -weights,
        "is_seq_max": of_rows,
        "is_seq_min": -of_rows,
        "is_seq_deviation": (of_rows - 1.0).abs(),
    }
    return Figures(sums, {name: _peak(values) for name, values in peaks.items()})


def _exp(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _peak(values: torch.Tensor) -> torch.Tensor:
    return values.max() if values.numel() else values.new_tensor(-math.inf)
