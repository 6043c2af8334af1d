"""Advantages. numpy only, float64: the trainer process imports this, and so do the ranks.

    estimator   what an estimator is and needs; the registry; lookup by name or `path.py:function`
    groups      statistics over the sessions of a prompt
    outcome     one advantage per session, from outcome scores (the trainer, which never sees tokens)
    tokens      one per token, from token-level rewards (the ranks)
    whitening   to mean 0 and variance 1 over all ranks, in two halves

`algorithm.adv_estimator` chooses one; docs/algorithms.md lists them.
"""

from streamrl.algorithms.advantages.estimator import (
    ADVANTAGE_ESTIMATORS,
    Estimator,
    estimator,
    register_advantage,
)
from streamrl.algorithms.advantages.groups import SAME_SCORE_RTOL
from streamrl.algorithms.advantages.outcome import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from streamrl.algorithms.advantages.tokens import gae, reinforce_plus_plus
from streamrl.algorithms.advantages.whitening import moments, whitened

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "SAME_SCORE_RTOL",
    "Estimator",
    "estimator",
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "moments",
    "opo",
    "register_advantage",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "whitened",
]
