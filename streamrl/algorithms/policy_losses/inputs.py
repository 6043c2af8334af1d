"""What a policy loss gets and returns, and how one is found by name.

    @register_policy_loss("mine")
    def mine(inputs: PolicyInputs, settings: PolicyLossSettings) -> PolicyLoss: ...

A loss is per token and unmasked; `aggregation_weights` averages it. All of a row's tokens are in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from agent_loop.plugins import Registry
from streamrl.algorithms.kl import log_ratio


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Of one micro-batch: T response tokens of B rows, row after row."""

    log_probs: torch.Tensor
    """f[T], with gradient."""
    old_log_probs: torch.Tensor
    """f[T]."""
    advantages: torch.Tensor
    """f[T]."""
    mask: torch.Tensor
    """f[T], `loss_mask`: 1 where the token counts."""
    row: torch.Tensor
    """i64[T], 0 to B - 1: whose token each is."""
    selected: torch.Tensor | None = None
    """f[T], 1 where the token was selected in its mini-batch (`select_by_covariance`). Of clip_cov and kl_cov."""

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        """f[T]: at each token, the mean of `values` f[T] over the counting tokens of its row; 0 if none counts."""
        rows = int(self.row.max()) + 1 if self.row.numel() else 0
        counts = self.mask.new_zeros(rows).index_add_(0, self.row, self.mask).clamp(min=1.0)
        kept = torch.where(self.mask > 0, values, torch.zeros_like(values))
        return (values.new_zeros(rows).index_add(0, self.row, kept) / counts)[self.row]

    def log_ratio(self) -> torch.Tensor:
        """log(pi / pi_old) f[T], bounded so that its exponential is finite."""
        return log_ratio(self.log_probs, self.old_log_probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossSettings:
    """Of all losses; each reads its own. Named as in `actor_rollout_ref.actor` and its `policy_loss`."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    clip_cov_ratio: float = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 2e-4
    ppo_kl_coef: float = 0.1
    tau_pos: float = 1.0
    tau_neg: float = 1.05


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """All f[T], unmasked, of the given tokens."""

    loss: torch.Tensor
    log_ratio: torch.Tensor
    """log(pi / pi_old), detached."""
    shares: dict[str, torch.Tensor] = field(default_factory=dict)
    """Metric → 1 at the tokens it counts, else 0: `pg_clipfrac`, where a clip decided; `pg_clipfrac_lower`, where the
    dual clip did; `pg_covfrac`, what was selected by covariance."""


PolicyLossFunction = Callable[[PolicyInputs, PolicyLossSettings], PolicyLoss]

POLICY_LOSSES: Registry[PolicyLossFunction] = Registry("policy loss")
"""`actor_rollout_ref.actor.policy_loss.loss_mode`."""

register_policy_loss = POLICY_LOSSES.register


def policy_loss(spec: str) -> PolicyLossFunction:
    """The loss registered as `spec`, or `path/to/file.py:function`. Raises PluginError."""
    return POLICY_LOSSES.resolve(spec)
