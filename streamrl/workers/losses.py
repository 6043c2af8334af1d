"""From an engine's log-probs to the actor's loss, by the functions of `streamrl.algorithms`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from streamrl.algorithms.aggregation import aggregation_weights
from streamrl.algorithms.kl import k3, log_ratio
from streamrl.algorithms.policy_losses import PolicyInputs, PolicyLossSettings, policy_loss
from streamrl.algorithms.rollout_correction import importance_weights, parse_threshold
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
        inputs = PolicyInputs(out.log_probs, old, out.columns["advantages"], mask, out.row, out.columns.get("selected"))
        settings = PolicyLossSettings(
            clip_ratio_low=_or(config.clip_ratio_low, config.clip_ratio),
            clip_ratio_high=_or(config.clip_ratio_high, config.clip_ratio),
            clip_ratio_c=config.clip_ratio_c,
        )
        policy = policy_loss(config.policy_loss.loss_mode)(inputs, settings)
        weights = aggregation_weights(
            mask, out.row, mode=config.loss_agg_mode, tokens=self.size.tokens, sequences=self.size.sequences
        )
        per_token, sums = policy.loss, {}
        if self.correction.rollout_is is not None:
            threshold = parse_threshold(self.correction.rollout_is_threshold)
            is_weights = importance_weights(
                old, out.columns["rollout_log_probs"], mask, out.row,
                level=self.correction.rollout_is, threshold=threshold,
            )  # fmt: skip
            per_token = per_token * is_weights
            sums = _weight_sums(is_weights, mask, threshold)
        pg_loss = (per_token * weights).sum()
        entropy = (out.entropy * weights).sum()
        loss = pg_loss - config.entropy_coeff * entropy
        sums |= {
            "pg_loss": pg_loss,
            "loss": loss,
            "entropy_loss": entropy,
            "entropy": (out.entropy * mask).sum(),
            "ppo_kl": -(policy.log_ratio * mask).sum(),
            "tokens": mask.sum(),
        } | {name: (share * mask).sum() for name, share in policy.shares.items()}
        if "rollout_log_probs" in out.columns:
            sums |= _drift_sums(out, mask)
        return loss, {name: value.detach() for name, value in sums.items()}


def _weight_sums(
    weights: torch.Tensor, mask: torch.Tensor, threshold: float | tuple[float, float]
) -> dict[str, torch.Tensor]:
    high = threshold[1] if isinstance(threshold, tuple) else threshold
    return {
        "rollout_is": (weights * mask).sum(),
        "rollout_is_high": ((weights >= high) * mask).sum(),
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
