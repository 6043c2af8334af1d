"""Advantages per token, from token-level rewards. They run on the ranks, over ragged rows.

    rewards  per row f64[R]     masks  per row [R], 1 = sampled by the policy     values  per row f64[R]

Tokens with mask 0 (tool and environment text) are skipped: the recursion passes over them as if they were not there,
and their outputs are 0. A reward on a mask-0 token counts for the last mask-1 token before it, so that a trajectory
that ends on tool text keeps its reward; one before the first mask-1 token was earned by no action and counts for none.
A row without any mask-1 token gives zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.algorithms.advantages.estimator import register_advantage


@register_advantage("gae", per="token", whiten=True)
def gae(
    rewards: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Generalised advantage estimation over the sampled tokens t = 1..n of a row, V_{n+1} = A_{n+1} = 0.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1};   returns = A_t + V_t

    The returns are the critic's targets; the advantages are then whitened over the loss tokens of the batch.

    Source: GAE (arXiv:1506.02438), eq. 11 to 16; PPO (arXiv:1707.06347), eq. 11.
    """
    advantages, returns = [], []
    for reward, mask, value in zip(rewards, masks, values, strict=True):
        sampled, earned = _sampled(reward, mask)
        if np.shape(value) != np.shape(mask):
            raise ValueError(f"gae: values {np.shape(value)} and mask {np.shape(mask)} of a row differ")
        v = np.asarray(value, dtype=np.float64)[sampled]
        delta = earned + gamma * np.append(v[1:], 0.0)[: len(v)] - v
        found = _discounted(delta, gamma * lam)
        advantages.append(_spread(found, sampled))
        returns.append(_spread(found + v, sampled))
    return advantages, returns


@register_advantage("reinforce_plus_plus", per="token", whiten=True)
def reinforce_plus_plus(
    rewards: Sequence[np.ndarray], masks: Sequence[np.ndarray], *, gamma: float = 1.0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Discounted return of each sampled token; no baseline but the batch's mean.

        A_t = G_t = r_t + gamma G_{t+1};  then whitened over the loss tokens of the batch (`whitening.py`)

    Source: REINFORCE++ (arXiv:2501.03262).
    """
    returns = []
    for reward, mask in zip(rewards, masks, strict=True):
        sampled, earned = _sampled(reward, mask)
        returns.append(_spread(_discounted(earned, gamma), sampled))
    return [each.copy() for each in returns], returns


def _sampled(reward: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool[R], which tokens were sampled; f64[n], what each of them earned, rewards on later mask-0 tokens included."""
    reward, sampled = np.asarray(reward, dtype=np.float64), np.asarray(mask) > 0
    if reward.shape != sampled.shape:
        raise ValueError(f"rewards {reward.shape} and mask {sampled.shape} of a row differ")
    if not np.isfinite(reward).all():
        t = int(np.flatnonzero(~np.isfinite(reward))[0])
        raise ValueError(f"the reward of token {t} is {reward[t]}; a reward must be a finite number")
    owner = np.cumsum(sampled) - 1
    return sampled, np.bincount(owner[owner >= 0], reward[owner >= 0], minlength=int(sampled.sum()))


def _discounted(values: np.ndarray, factor: float) -> np.ndarray:
    """f64[n]: x_t + factor * (x_{t+1} + factor * (...))."""
    found, running = np.empty_like(values), 0.0
    for t in range(len(values) - 1, -1, -1):
        running = values[t] + factor * running
        found[t] = running
    return found


def _spread(values: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    found = np.zeros(len(sampled), np.float64)
    found[sampled] = values
    return found
