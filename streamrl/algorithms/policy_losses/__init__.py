"""Policy-gradient losses. torch; imported by the ranks.

    inputs      what a loss gets, which settings it reads, what it returns; the registry
    token       ratios and gates per token: vanilla, cispo, sapo, gpg
    sequence    one ratio per row: gspo, geo_mean
    covariance  a few tokens of the mini-batch treated apart: clip_cov, kl_cov, and how they are selected

`actor_rollout_ref.actor.policy_loss.loss_mode` chooses one; docs/algorithms.md lists them.
"""

from streamrl.algorithms.policy_losses.covariance import (
    NEEDS_SELECTION,
    clip_cov,
    kl_cov,
    select_by_covariance,
    token_draws,
)
from streamrl.algorithms.policy_losses.inputs import (
    POLICY_LOSSES,
    PolicyInputs,
    PolicyLoss,
    PolicyLossSettings,
    policy_loss,
    register_policy_loss,
)
from streamrl.algorithms.policy_losses.sequence import geo_mean, gspo
from streamrl.algorithms.policy_losses.token import cispo, gpg, sapo, vanilla

__all__ = [
    "NEEDS_SELECTION",
    "POLICY_LOSSES",
    "PolicyInputs",
    "PolicyLoss",
    "PolicyLossSettings",
    "cispo",
    "clip_cov",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "policy_loss",
    "register_policy_loss",
    "sapo",
    "select_by_covariance",
    "token_draws",
    "vanilla",
]
