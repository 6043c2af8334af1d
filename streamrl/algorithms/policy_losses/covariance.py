"""Losses against the collapse of entropy: a few tokens of a mini-batch, those whose log-prob and advantage covary most,
are treated apart (The Entropy Mechanism of RL for Reasoning Language Models, arXiv:2505.22617).

    cov_t = (log_prob_t - mean log_prob) (A_t - mean A)         means over the counting tokens of the mini-batch

Who is selected is decided once per mini-batch, before its first forward, and comes to the loss as a mask like any other
column; so it depends neither on micro-batches nor on ranks:

    log_probs, advantages, masks of this rank's rows ──select_by_covariance(…, all_sum)──► selected f32[R] per row

`log_probs` are those at the start of the mini-batch: old_log_probs on the first mini-batch after they were computed; a
fresh `infer` if the policy has moved far since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from streamrl.algorithms.policy_losses.inputs import PolicyInputs, PolicyLoss, PolicyLossSettings, register_policy_loss
from streamrl.algorithms.policy_losses.token import clipped_surrogate

NEEDS_SELECTION = frozenset({"clip_cov", "kl_cov"})
"""Losses that need `PolicyInputs.selected`."""


@register_policy_loss("clip_cov")
def clip_cov(inputs: PolicyInputs, settings: PolicyLossSettings) -> PolicyLoss:
    """Tokens drawn from those of high covariance leave the update. Needs `selected`.

        L = 0 where selected, else max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high))

    Selected are clip_cov_ratio of the mini-batch's tokens (at least one), drawn at random from those with
    clip_cov_lb < cov_t < clip_cov_ub.

    Settings: clip_ratio_low, clip_ratio_high, clip_cov_ratio, clip_cov_lb, clip_cov_ub.

    Source: Clip-Cov (arXiv:2505.22617).
    """
    selected, log_r = _selected(inputs, "clip_cov"), inputs.log_ratio()
    loss, clipped = clipped_surrogate(log_r.exp(), inputs.advantages, settings)
    chosen = selected > 0
    shares = {"pg_clipfrac": torch.where(chosen, 0.0, clipped), "pg_covfrac": selected}
    return PolicyLoss(torch.where(chosen, torch.zeros_like(loss), loss), log_r.detach(), shares)


@register_policy_loss("kl_cov")
def kl_cov(inputs: PolicyInputs, settings: PolicyLossSettings) -> PolicyLoss:
    """Tokens of the highest covariance pay for moving away from the old policy. Needs `selected`.

        L = -A r;  where selected  L = -A r + ppo_kl_coef |log r|

    Selected are the kl_cov_ratio of the mini-batch's tokens (at least one) with the highest cov_t.

    Settings: kl_cov_ratio, ppo_kl_coef.

    Source: KL-Cov (arXiv:2505.22617), with |log r| as the estimate of the KL as in the authors' code.
    """
    selected, log_r = _selected(inputs, "kl_cov"), inputs.log_ratio()
    loss = -inputs.advantages * log_r.exp() + settings.ppo_kl_coef * selected * log_r.abs()
    return PolicyLoss(loss, log_r.detach(), {"pg_covfrac": selected})


def _selected(inputs: PolicyInputs, loss: str) -> torch.Tensor:
    if inputs.selected is None:
        raise ValueError(f"policy loss {loss!r} needs the tokens selected in its mini-batch: see select_by_covariance")
    return inputs.selected.to(inputs.advantages.dtype)


# --- selection: numpy, once per mini-batch --------------------------------------------------------------------------


def select_by_covariance(
    loss: str,
    log_probs: Sequence[np.ndarray],
    advantages: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    *,
    settings: PolicyLossSettings,
    draws: Sequence[np.ndarray] | None = None,
    all_sum: Callable[[np.ndarray], np.ndarray] = lambda values: values,
    rank: int = 0,
    world_size: int = 1,
) -> list[np.ndarray]:
    """Per row f32[R], 1 at the tokens that `clip_cov` or `kl_cov` treats apart. Collective: two calls of `all_sum`.

    Args:
        log_probs, advantages, masks: per row of this rank's part of the mini-batch, [R] each.
        draws: of clip_cov, per row f64[R], uniform in [0, 1): the eligible tokens with the largest are selected. From
            `token_draws` they do not depend on where a row lies.
        all_sum: adds an f64 array over the data-parallel ranks.
    """
    total = all_sum(_sums(log_probs, advantages, masks))
    mean_log_prob, mean_advantage = total[1:] / max(total[0], 1.0)
    priorities = []
    for i, (log_prob, advantage, mask) in enumerate(zip(log_probs, advantages, masks, strict=True)):
        cov = (np.asarray(log_prob, np.float64) - mean_log_prob) * (np.asarray(advantage, np.float64) - mean_advantage)
        eligible = np.asarray(mask) > 0
        if loss == "clip_cov":
            if draws is None:
                raise ValueError("clip_cov selects at random: give draws, from token_draws(keys, lengths, seed=...)")
            eligible &= (cov > settings.clip_cov_lb) & (cov < settings.clip_cov_ub)
            cov = np.asarray(draws[i], np.float64)
        priorities.append(np.where(eligible, cov, -np.inf))
    share = settings.clip_cov_ratio if loss == "clip_cov" else settings.kl_cov_ratio
    count = max(int(share * total[0]), 1)
    slots = np.zeros((world_size, count), np.float64)
    slots[rank] = _largest(priorities, count)
    limit = np.sort(all_sum(slots), axis=None)[-count]
    return [((each >= limit) & (each > -np.inf)).astype(np.float32) for each in priorities]


def token_draws(keys: Sequence[str], lengths: Sequence[int], *, seed: int) -> list[np.ndarray]:
    """f64[R] per row, uniform in [0, 1): a function of the row's key, the token's place and `seed` alone."""
    found = []
    for key, length in zip(keys, lengths, strict=True):
        digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest()
        found.append(np.random.default_rng(int.from_bytes(digest, "little")).random(length))
    return found


def _sums(log_probs: Sequence[np.ndarray], advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> np.ndarray:
    """f64[3]: counting tokens, their log-probs, their advantages."""
    found = np.zeros(3, np.float64)
    for log_prob, advantage, mask in zip(log_probs, advantages, masks, strict=True):
        kept = np.asarray(mask) > 0
        found += (kept.sum(), np.sum(log_prob[kept], dtype=np.float64), np.sum(advantage[kept], dtype=np.float64))
    return found


def _largest(rows: Sequence[np.ndarray], count: int) -> np.ndarray:
    """f64[count], -inf where there are fewer."""
    flat = np.concatenate([*rows, np.full(count, -np.inf)])
    return np.sort(flat)[-count:]
