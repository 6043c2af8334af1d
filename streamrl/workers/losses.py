"""From an engine's outputs to the actor's and the critic's loss, by the functions of `streamrl.algorithms`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from streamrl.algorithms.aggregation import aggregation_weights
from streamrl.algorithms.kl import kl_estimator
from streamrl.algorithms.policy_losses import PolicyInputs, PolicyLoss, PolicyLossSettings, policy_loss
from streamrl.algorithms.rollout_diagnostics import policy_gap
from streamrl.algorithms.value_loss import value_loss
from streamrl.config.sections.actor import ActorConfig, CriticConfig
from streamrl.config.sections.algorithm import DistillationConfig
from streamrl.workers.batch import Rows, unflatten
from streamrl.workers.engine.base import TokenOutputs
from streamrl.workers.preparation import counts, session_numbers

Sums = dict[str, torch.Tensor]


def loss_weights(
    rows: Rows, keys: list[str], config: ActorConfig | CriticConfig, all_sum: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray] | None:
    """What each token of this rank's part of a mini-batch counts, f32[R] per row; None if none counts on any rank.

    Collective. A sequence, where the aggregation averages over sequences, is a session: all its rows together weigh as
    much as the single row of another. Decided before the cut into micro-batches, so that it does not depend on it.
    """
    masks = rows.columns["loss_mask"]
    tokens, sessions = all_sum(counts(keys, masks))
    if not tokens:
        return None
    of_token = np.repeat(np.array(session_numbers(keys), np.int64), rows.responses)
    weights = aggregation_weights(
        torch.from_numpy(rows.flat("loss_mask")), torch.from_numpy(of_token), mode=config.loss_agg_mode,
        tokens=float(tokens), sequences=float(sessions), scale=config.loss_scale_factor,
    )  # fmt: skip
    return unflatten(weights.numpy(), rows.responses)


@dataclass(frozen=True, slots=True)
class ActorLoss:
    """L = pg_loss - entropy_coeff * entropy + kl_loss_coef * kl_loss + distillation_loss_coef * distillation_loss, each
    summed with `loss_weights`; with distillation and without use_task_rewards pg_loss is left out.

    Columns it needs: `loss_mask`, `loss_weights`, `advantages`, `old_log_probs`; where there are
    such, `rollout_is_weights` multiply the policy loss, `selected` goes to losses that treat some tokens apart; with
    use_kl_loss `ref_log_prob`.
    """

    config: ActorConfig
    loss_mode: str = ""
    """Empty: the configured one."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    peaks: Sums = field(default_factory=dict)
    """What does not add up over the calls: the largest so far (policy_gap)."""
    old_is_current: bool = False
    """pi_old is the policy itself, without gradient; `old_log_probs` are then not needed."""

    def __call__(self, out: TokenOutputs) -> tuple[torch.Tensor, Sums]:
        config, columns, mask = self.config, out.columns, out.columns["loss_mask"]
        old = out.log_probs.detach() if self.old_is_current else columns["old_log_probs"]
        policy = self._policy_loss(
            PolicyInputs(out.log_probs, old, columns["advantages"], mask, out.row, columns.get("selected"))
        )
        weights = columns["loss_weights"]
        per_token = policy.loss * columns["rollout_is_weights"] if "rollout_is_weights" in columns else policy.loss
        pg_loss, entropy = (per_token * weights).sum(), (out.entropy * weights).sum()
        teaches = self.distillation.enabled
        task = 0.0 if teaches and not self.distillation.distillation_loss.use_task_rewards else 1.0
        loss = task * pg_loss - config.entropy_coeff * entropy
        sums = {
            "pg_loss": pg_loss,
            "entropy_loss": entropy,
            "entropy": (out.entropy * mask).sum(),
            "ppo_kl": -(policy.log_ratio * mask).sum(),
            "tokens": mask.sum(),
            **{name: (share * mask).sum() for name, share in policy.shares.items()},
        }
        if config.use_kl_loss:
            estimate = kl_estimator(config.kl_loss_type)
            kl = (estimate(out.log_probs, columns["ref_log_prob"]) * weights).sum()
            loss = loss + config.kl_loss_coef * kl
            sums["kl_loss"] = kl
        if teaches:
            chosen = self.distillation.distillation_loss
            away = kl_estimator(chosen.loss_mode)(out.log_probs, columns["teacher_log_prob"])
            sums["distillation_loss"] = (away * weights).sum()
            loss = loss + chosen.distillation_loss_coef * sums["distillation_loss"]
        if "rollout_log_probs" in columns:
            gap = policy_gap(out.log_probs, columns["rollout_log_probs"], mask, out.row)
            sums |= gap.sums
            for name, value in gap.peaks.items():
                self.peaks[name] = torch.maximum(self.peaks.get(name, value), value)
        sums["loss"] = loss
        return loss, {name: value.detach() for name, value in sums.items()}

    def _policy_loss(self, inputs: PolicyInputs) -> PolicyLoss:
        """Raises TypeError, ValueError naming the loss when it returns something else, or not one value per token."""
        name = self.loss_mode or self.config.policy_loss.loss_mode
        found = policy_loss(name)(inputs, policy_settings(self.config))
        if not isinstance(found, PolicyLoss):
            raise TypeError(f"policy loss {name!r} returned {type(found).__name__}; it returns a PolicyLoss")
        for part, values in {"loss": found.loss, "log_ratio": found.log_ratio, **found.shares}.items():
            if not isinstance(values, torch.Tensor) or values.shape != inputs.log_probs.shape:
                shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
                whole = tuple(inputs.log_probs.shape)
                raise ValueError(f"policy loss {name!r}: {part} is {shape}; it is one value per token, {whole}")
        return found


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Clipped squared error against `returns`, summed with `loss_weights`. Columns: these, `loss_mask`, and `values` as
    they were when the advantages were made."""

    config: CriticConfig

    def __call__(self, out: TokenOutputs) -> tuple[torch.Tensor, Sums]:
        assert out.values is not None, "a critic's engine returns values"
        mask, returns = out.columns["loss_mask"], out.columns["returns"]
        found = value_loss(out.values, out.columns["values"], returns, cliprange_value=self.config.cliprange_value)
        loss = (found.loss * out.columns["loss_weights"]).sum()
        sums = {
            "vf_loss": loss,
            "vf_clipfrac": (found.clipped * mask).sum(),
            "vpred": (out.values * mask).sum(),
            "squared_error": ((out.values - returns).square() * mask).sum(),
            "returns": (returns * mask).sum(),
            "returns_squared": (returns.square() * mask).sum(),
            "tokens": mask.sum(),
        }
        return loss, {name: value.detach() for name, value in sums.items()}


def policy_settings(config: ActorConfig) -> PolicyLossSettings:
    loss = config.policy_loss
    return PolicyLossSettings(
        clip_ratio_low=config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c, clip_cov_ratio=loss.clip_cov_ratio, clip_cov_lb=loss.clip_cov_lb,
        clip_cov_ub=loss.clip_cov_ub, kl_cov_ratio=loss.kl_cov_ratio, ppo_kl_coef=loss.ppo_kl_coef,
        tau_pos=config.tau_pos, tau_neg=config.tau_neg,
    )  # fmt: skip
