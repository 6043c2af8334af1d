"""From an engine's log-probs to the actor's loss, by the functions of `streamrl.algorithms`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from streamrl.algorithms.kl import k3, log_ratio
from streamrl.algorithms.policy_loss import POLICY_LOSSES, aggregation_weights, importance_weights
from streamrl.config.sections.actor import ActorConfig
from streamrl.config.sections.algorithm import RolloutCorrectionConfig
from streamrl.workers.engine.base import TokenOutputs


@dataclass(frozen=True, slots=True)
class MiniBatchSize:
    """What counts in one mini-batch, over all ranks."""

    tokens: float
    """With loss mask 1."""
    sequences: float
    """Rows with at least one such token."""


@dataclass(frozen=True, slots=True)
class ActorLoss:
    """L = pg_loss - entropy_coeff * entropy, aggregated over the global mini-batch.

    Columns it needs: `loss_mask`, `advantages`, `old_log_probs`; with rollout correction also `rollout_log_probs`.
    """

    config: ActorConfig
    correction: RolloutCorrectionConfig
    size: MiniBatchSize

    def __call__(self, out: TokenOutputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        config, mask, old = self.config, out.columns["loss_mask"], out.columns["old_log_probs"]
        policy = POLICY_LOSSES[config.policy_loss.loss_mode](
            out.log_probs, old, out.columns["advantages"],
            clip_ratio_low=_or(config.clip_ratio_low, config.clip_ratio),
            clip_ratio_high=_or(config.clip_ratio_high, config.clip_ratio),
            clip_ratio_c=config.clip_ratio_c,
        )  # fmt: skip
        weights = aggregation_weights(
            mask, out.row, mode=config.loss_agg_mode, tokens=self.size.tokens, sequences=self.size.sequences
        )
        per_token, sums = policy.loss, {}
        if self.correction.rollout_is is not None:
            is_weights = importance_weights(
                old, out.columns["rollout_log_probs"], threshold=self.correction.rollout_is_threshold
            )
            per_token = per_token * is_weights
            sums = _weight_sums(is_weights, mask, self.correction.rollout_is_threshold)
        pg_loss = (per_token * weights).sum()
        entropy = (out.entropy * weights).sum()
        loss = pg_loss - config.entropy_coeff * entropy
        sums |= {
            "pg_loss": pg_loss,
            "loss": loss,
            "entropy_loss": entropy,
            "entropy": (out.entropy * mask).sum(),
            "ppo_kl": -(policy.log_ratio * mask).sum(),
            "pg_clipfrac": (policy.clipped * mask).sum(),
            "pg_clipfrac_lower": (policy.clipped_lower * mask).sum(),
            "tokens": mask.sum(),
        }
        if "rollout_log_probs" in out.columns:
            sums |= _drift_sums(out, mask)
        return loss, {name: value.detach() for name, value in sums.items()}


def _weight_sums(weights: torch.Tensor, mask: torch.Tensor, threshold: float) -> dict[str, torch.Tensor]:
    return {
        "rollout_is": (weights * mask).sum(),
        "rollout_is_high": ((weights >= threshold) * mask).sum(),
    }


def _drift_sums(out: TokenOutputs, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far the policy being trained is from the one that sampled."""
    rollout, log_probs = out.columns["rollout_log_probs"], out.log_probs.detach()
    return {
        "rollout_kl": -(log_ratio(log_probs, rollout) * mask).sum(),
        "rollout_k3_kl": (k3(rollout, log_probs) * mask).sum(),
        "rollout_probs_diff": ((log_probs.exp() - rollout.exp()).abs() * mask).sum(),
    }


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
