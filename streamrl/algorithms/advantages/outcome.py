"""Advantages from outcome scores: one scalar per session.

The ranks spread each over the tokens of its session's rows. Every estimator takes

    scores       f64[N], one outcome score per session
    group_index  i64[N], the prompt group of each session; any integers, groups need not be contiguous

returns f64[N], and raises ValueError where shapes differ or a number is not finite. A group whose scores are all equal
up to float residue, hence also a group of one session, has nothing to compare: its advantages are exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.algorithms.advantages.estimator import register_advantage
from streamrl.algorithms.advantages.groups import finite, grouped, per_session, same

EPS = 1e-6
"""Added to a standard deviation that divides."""


@register_advantage("grpo")
def grpo(scores: np.ndarray, group_index: np.ndarray, *, norm_by_std: bool = True) -> np.ndarray:
    """Group-relative advantages.

        A_i = (s_i - mean(g_i)) / (std(g_i) + 1e-6)

    with the mean and the unbiased standard deviation of the group's scores. `norm_by_std=False` leaves the division
    out (Dr. GRPO).

    Sources: DeepSeekMath (arXiv:2402.03300), outcome supervision; Dr. GRPO (arXiv:2503.20783) for norm_by_std=False.
    """
    groups = grouped("grpo", scores, group_index)
    return groups.centred() / (groups.std() + EPS) if norm_by_std else groups.centred()


@register_advantage("rloo")
def rloo(scores: np.ndarray, group_index: np.ndarray) -> np.ndarray:
    """Leave-one-out: each session is compared with the mean of the others of its group.

        A_i = s_i - 1/(n-1) sum_{j != i} s_j = n/(n-1) (s_i - mean(g_i))

    Source: Back to Basics (arXiv:2402.14740), RLOO.
    """
    groups = grouped("rloo", scores, group_index)
    return groups.centred() * (groups.count / np.maximum(groups.count - 1, 1))[groups.group]


@register_advantage("remax")
def remax(scores: np.ndarray, group_index: np.ndarray, *, baselines: np.ndarray) -> np.ndarray:
    """Each session is compared with the greedy answer to its prompt.

        A_i = s_i - b_i

    baselines: f64[N], the greedy answer's score, of each session's prompt. Here a group of equal scores does have
    something to compare with; only a score equal to its baseline has advantage 0.

    Source: ReMax (arXiv:2310.10505), algorithm 2.
    """
    groups = grouped("remax", scores, group_index)
    baselines = per_session("remax", "baseline", baselines, groups)
    return np.where(same(groups.scores, baselines), 0.0, groups.scores - baselines)


@register_advantage("reinforce_plus_plus_baseline", whiten=True)
def reinforce_plus_plus_baseline(scores: np.ndarray, group_index: np.ndarray) -> np.ndarray:
    """Group mean as baseline; the normalisation is over the batch, not the group.

        A_i = s_i - mean(g_i);  then whitened over the loss tokens of the batch (`whitening.py`)

    Source: REINFORCE++ (arXiv:2501.03262), with baseline.
    """
    return grouped("reinforce_plus_plus_baseline", scores, group_index).centred()


@register_advantage("opo")
def opo(scores: np.ndarray, group_index: np.ndarray, *, lengths: np.ndarray) -> np.ndarray:
    """Length-weighted baseline: the variance-minimal one when a gradient's square grows with its length.

        A_i = s_i - sum_j l_j s_j / sum_j l_j     over the sessions j of the group

    lengths: f64[N], sampled tokens of each session, >= 0. A group in which nobody sampled a token uses the plain mean.

    Source: OPO (arXiv:2505.23585).
    """
    groups = grouped("opo", scores, group_index)
    lengths = per_session("opo", "length", lengths, groups)
    if (lengths < 0).any():
        raise ValueError(f"opo: length {int(np.argmin(lengths))} is {lengths.min():g}; lengths count tokens")
    total = np.bincount(groups.group, lengths)
    weighted = np.bincount(groups.group, lengths * groups.scores) / np.where(total > 0, total, 1.0)
    baseline = np.where((total > 0)[groups.group], weighted[groups.group], groups.mean(groups.scores))
    return np.where(groups.degenerate, 0.0, groups.scores - baseline)


@register_advantage("gpg")
def gpg(scores: np.ndarray, group_index: np.ndarray) -> np.ndarray:
    """Centred scores, scaled up for the sessions that carry no gradient.

        A_i = alpha (s_i - mean(g_i)),  alpha = N / (N - M)

    with M the sessions, of the N given, that are in groups of equal scores. Use with policy loss `gpg`.

    Source: GPG (arXiv:2504.02546), accurate gradient estimation, F_norm = 1.
    """
    groups = grouped("gpg", scores, group_index)
    comparing = len(groups.scores) - int(groups.degenerate.sum())
    return groups.centred() * (len(groups.scores) / max(comparing, 1))


@register_advantage("grpo_passk")
def grpo_passk(scores: np.ndarray, group_index: np.ndarray, *, norm_by_std: bool = True) -> np.ndarray:
    """What each session adds to the best score of its group: only the best one adds anything.

        A_i = max_j s_j - max_{j != i} s_j;  with norm_by_std  A_i / (std(g_i) + 1e-6)

    Source: leave-one-out gradient of the maximum, Tang et al. (arXiv:2503.19595); the division is that of grpo.
    """
    groups = grouped("grpo_passk", scores, group_index)
    order = np.lexsort((groups.scores, groups.group))  # by group, the best last
    last = np.cumsum(groups.count) - 1
    advantages = np.zeros_like(groups.scores)
    comparing = ~groups.equal
    best, second = order[last[comparing]], order[last[comparing] - 1]
    tied = same(groups.scores[second], groups.scores[best])
    advantages[best] = np.where(tied, 0.0, groups.scores[best] - groups.scores[second])
    return advantages / (groups.std() + EPS) if norm_by_std else advantages


@register_advantage("gdpo")
def gdpo(
    scores: np.ndarray, group_index: np.ndarray, *, components: np.ndarray, weights: Sequence[float] | None = None
) -> np.ndarray:
    """Each reward component is normalised within its group before they are added, so that none drowns another.

        a_i  = sum_k w_k (c_ik - mean(g_i)_k) / (std(g_i)_k + 1e-6)
        A_i  = (a_i - mean(a)) / (std(a) + 1e-6)         over all N sessions given

    components: f64[N, K]; weights: f64[K], default 1. A component that is equal within a group adds 0 there; if all a_i
    are equal, all A_i are 0. `scores` only has to be finite.

    Source: GDPO (arXiv:2601.05242).
    """
    groups = grouped("gdpo", scores, group_index)
    components = np.asarray(components, dtype=np.float64)
    if components.ndim != 2 or len(components) != len(groups.scores) or not components.shape[1]:
        raise ValueError(f"gdpo: {len(groups.scores)} sessions need components [N, K], not {components.shape}")
    finite("gdpo", "components of session", components)
    factors = np.ones(components.shape[1]) if weights is None else np.asarray(weights, np.float64)
    if factors.shape != components.shape[1:]:
        raise ValueError(f"gdpo: {components.shape[1]} components but weights have shape {factors.shape}")
    total = np.zeros_like(groups.scores)
    for factor, component in zip(factors, components.T, strict=True):
        total += factor * grpo(component, group_index)
    centred = grouped("gdpo", total, np.zeros(len(total), np.int64)) if len(total) else groups
    return centred.centred() / (centred.std() + EPS)
