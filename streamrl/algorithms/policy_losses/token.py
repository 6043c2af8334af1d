"""Losses whose ratio is that of the token. r = exp(log_probs - old_log_probs), A the token's advantage."""

from __future__ import annotations

import torch

from streamrl.algorithms.policy_losses.inputs import PolicyInputs, PolicyLoss, PolicyLossSettings, register_policy_loss


@register_policy_loss("vanilla")
def vanilla(inputs: PolicyInputs, settings: PolicyLossSettings) -> PolicyLoss:
    """Clipped surrogate with dual clip.

        L = max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high));  where A < 0:  L = min(L, -A clip_ratio_c)

    The dual clip bounds what a token of negative advantage can cost when its ratio explodes, which the plain clip
    does not. It is no safeguard against stale samples: see optim.staleness_aware and actor.target_kl.

    Settings: clip_ratio_low, clip_ratio_high, clip_ratio_c.

    Sources: PPO (arXiv:1707.06347) eq. 7; dual clip (arXiv:1912.09729) eq. 5; separate bounds: DAPO (arXiv:2503.14476).
    """
    log_r, advantages = inputs.log_ratio(), inputs.advantages
    loss, clipped = clipped_surrogate(log_r.exp(), advantages, settings)
    ceiling = -advantages * settings.clip_ratio_c
    lower = (advantages < 0) & (loss > ceiling)
    return PolicyLoss(
        torch.where(lower, ceiling, loss),
        log_r.detach(),
        {"pg_clipfrac": clipped, "pg_clipfrac_lower": lower.to(loss.dtype)},
    )


@register_policy_loss("cispo")
def cispo(inputs: PolicyInputs, settings: PolicyLossSettings) -> PolicyLoss:
    """The importance weight is clipped, not the update: every token keeps a gradient. sg stops the gradient.

        L = -sg(clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)) A log_probs

    Settings: clip_ratio_low (1 or more: no lower bound, as in the paper), clip_ratio_high.

    Source: MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5.
    """
    log_r = inputs.log_ratio().detach()
    ratio = log_r.exp()
    weight = ratio.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    loss = -weight * inputs.advantages * inputs.log_probs
    return PolicyLoss(loss, log_r, {"pg_clipfrac": (weight != ratio).to(loss.dtype)})


@register_policy_loss("sapo")
def sapo(inputs: PolicyInputs, settings: PolicyLossSettings) -> PolicyLoss:
    """A smooth gate in place of the clip: weight 1 on-policy, fading as the ratio leaves 1.

        L = -A 4/tau sigmoid(tau (r - 1)),  tau = tau_pos where A > 0, else tau_neg

    Settings: tau_pos, tau_neg (the larger, the faster it fades).

    Source: Soft Adaptive Policy Optimization (arXiv:2511.20347).
    """
    log_r, advantages = inputs.log_ratio(), inputs.advantages
    tau = torch.full_like(log_r, settings.tau_neg).masked_fill(advantages > 0, settings.tau_pos)
    gate = torch.sigmoid(tau * (log_r.exp() - 1.0)) * 4.0 / tau
    return PolicyLoss(-advantages * gate, log_r.detach())


@register_policy_loss("gpg")
def gpg(inputs: PolicyInputs, settings: PolicyLossSettings) -> PolicyLoss:
    """The plain policy gradient: no ratio, no clip. Meant for on-policy data and advantage estimator `gpg`.

        L = -A log_probs

    Source: GPG (arXiv:2504.02546).
    """
    return PolicyLoss(-inputs.advantages * inputs.log_probs, inputs.log_ratio().detach())


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, settings: PolicyLossSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-A r, -A clip(r)) f[T], and 1 where the clip decided."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    return torch.maximum(plain, bounded), (bounded > plain).to(plain.dtype)
