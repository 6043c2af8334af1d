"""Losses whose ratio is that of the whole row: means of log-ratios over its counting tokens.

Both papers average over sequences: use loss_agg_mode=seq-mean-token-mean.
"""

from __future__ import annotations

import torch

from streamrl.algorithms.kl import LOG_RATIO_LIMIT
from streamrl.algorithms.policy_losses.inputs import PolicyInputs, PolicyLoss, PolicyLossSettings, register_policy_loss
from streamrl.algorithms.policy_losses.token import clipped_surrogate


@register_policy_loss("gspo")
def gspo(inputs: PolicyInputs, settings: PolicyLossSettings) -> PolicyLoss:
    """Clipped surrogate on the length-normalised ratio of the row. sg stops the gradient; |y| counts mask 1.

        s   = exp(1/|y| sum_t log(pi_t / pi_old_t))
        s_t = sg(s) pi_t / sg(pi_t)
        L_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_ratio_low, 1 + clip_ratio_high))

    All tokens of a row are clipped or none is. With one advantage per row, the gradient is that of GSPO itself; with
    one per token, this is GSPO-token. Bounds are far smaller than a token's: the paper uses 3e-4 and 4e-4.

    Settings: clip_ratio_low, clip_ratio_high.

    Source: GSPO (arXiv:2507.18071), eq. 5, 7, 13 and 14.
    """
    log_r, log_probs = inputs.log_ratio().detach(), inputs.log_probs
    of_row = inputs.row_mean(log_probs.detach() - inputs.old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = (of_row + log_probs - log_probs.detach()).exp()
    loss, clipped = clipped_surrogate(ratio, inputs.advantages, settings)
    return PolicyLoss(loss, log_r, {"pg_clipfrac": clipped})


@register_policy_loss("geo_mean")
def geo_mean(inputs: PolicyInputs, settings: PolicyLossSettings) -> PolicyLoss:
    """Geometric instead of arithmetic mean of the clipped ratios of a row, less moved by single tokens (GMPO).

        l_t = log(pi_t / pi_old_t), bounded to [-clip_ratio_low, clip_ratio_high] where that lowers A_t l_t
        L_t = -mean_t(A_t) exp(1/|y| sum_t l_t)        the same at each token of the row

    The bounds are on the logarithm of the ratio; the paper uses 0.4 for both.

    Settings: clip_ratio_low, clip_ratio_high.

    Source: GMPO (arXiv:2507.20673).
    """
    log_r, advantages = inputs.log_ratio(), inputs.advantages
    bounded = log_r.clamp(-settings.clip_ratio_low, settings.clip_ratio_high)
    sign = torch.sign(advantages)
    clipped = sign * bounded < sign * log_r
    kept = torch.where(clipped, bounded, log_r)
    loss = -inputs.row_mean(advantages) * inputs.row_mean(kept).exp()
    return PolicyLoss(loss, log_r.detach(), {"pg_clipfrac": clipped.to(loss.dtype)})
