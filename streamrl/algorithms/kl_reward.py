"""KL as a penalty in the reward (`algorithm.use_kl_in_reward`). torch; on the ranks, over ragged rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from streamrl.algorithms.kl import kl_estimator


def penalised_rewards(
    rewards: Sequence[np.ndarray],
    log_probs: Sequence[np.ndarray],
    ref_log_prob: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    *,
    coef: float,
    estimator: str = "kl",
) -> tuple[list[np.ndarray], np.ndarray]:
    """Token-level rewards less the KL of the policy that acted.

        r_t = score_t - coef kl_t where the mask is 1;  r_t = score_t elsewhere

    Args: per row [R] each: rewards (the outcome score at one token), log_probs of the policy that acted, ref_log_prob,
    masks. `estimator`: a name of KL_ESTIMATORS.

    Returns: per row f64[R]; and f64[2], what the controller needs and ranks add up: the sum over rows of their mean KL
    per token, and how many rows have a token that counts.

    Source: Ziegler et al. (arXiv:1909.08593), eq. 2.
    """
    estimate, found, total = kl_estimator(estimator), [], np.zeros(2, np.float64)
    for reward, policy, reference, mask in zip(rewards, log_probs, ref_log_prob, masks, strict=True):
        counts = np.asarray(mask) > 0
        acted, compared = (torch.from_numpy(np.array(each, np.float64)) for each in (policy, reference))
        kl = np.where(counts, estimate(acted, compared).numpy(), 0.0)
        found.append(np.asarray(reward, np.float64) - coef * kl)
        if counts.any():
            total += (kl.sum() / counts.sum(), 1.0)
    return found, total
