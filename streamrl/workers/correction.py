"""Once per mini-batch, before its forward: who is rejected, what each token weighs, which tokens are treated apart.

    reference log-probs ─┐
    rollout log-probs  ──┴─► loss_mask narrowed, rollout_is_weights        selected (clip_cov, kl_cov)

The reference is the old policy where there is one (decoupled), else the policy as it is before this mini-batch's step
(bypass). Decided here and not in the loss, all of it is a column like any other: counted in the denominators, and the
same for any cut into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from streamrl.algorithms.policy_losses import select_by_covariance, token_draws
from streamrl.algorithms.rollout_correction import importance_weights, normalised, rejection_mask, weight_sums
from streamrl.algorithms.thresholds import parse_threshold, rejection_rules
from streamrl.config.sections.actor import ActorConfig
from streamrl.config.sections.algorithm import RolloutCorrectionConfig
from streamrl.workers.batch import Rows, unflatten
from streamrl.workers.losses import policy_settings

if TYPE_CHECKING:
    from streamrl.workers.engine.base import Engine

AllSum = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Correction:
    config: RolloutCorrectionConfig

    def apply(self, rows: Rows, reference: str, all_sum: AllSum) -> dict[str, float]:
        """Collective. `reference` names the column of log-probs. Sums for the metrics, over this rank's tokens."""
        config = self.config
        if config.rollout_is is None and config.rollout_rs is None:
            return {}
        log_probs, rollout, mask = (
            torch.from_numpy(rows.flat(n)) for n in (reference, "rollout_log_probs", "loss_mask")
        )
        row = torch.from_numpy(np.repeat(np.arange(len(rows)), rows.responses))
        kept, sums = mask, {}
        if config.rollout_rs is not None:
            rules = rejection_rules(config.rollout_rs, config.rollout_rs_threshold)
            kept = rejection_mask(log_probs, rollout, mask, row, rules).mask
            sums |= {"rejected": float((mask - kept).sum()), "asked": float(mask.sum())}
            rows.columns["loss_mask"] = unflatten(kept.numpy(), rows.responses)
        if (level := config.rollout_is) is not None:
            threshold = parse_threshold(config.rollout_is_threshold)
            # The ratio of a row is that of all it sampled, rejected tokens included; what counts is what was kept.
            weights = importance_weights(log_probs, rollout, mask, row, level=level, threshold=threshold)
            high = threshold[1] if isinstance(threshold, tuple) else threshold
            sums |= {
                "rollout_is": float((weights * kept).sum()),
                "rollout_is_high": float(((weights >= high) * kept).sum()),
            }
            if config.rollout_is_batch_normalize:
                total = all_sum(weight_sums(weights, kept, row, level=level).numpy())
                weights = normalised(weights, torch.from_numpy(total))
            rows.columns["rollout_is_weights"] = unflatten(weights.numpy(), rows.responses)
        return sums


def select_tokens(
    config: ActorConfig, rows: Rows, keys: list[str], reference: str, engine: Engine, *, seed: int
) -> list[np.ndarray]:
    """f32[R] per row: the tokens that clip_cov or kl_cov treats apart. Collective."""
    columns = rows.columns
    return select_by_covariance(
        config.policy_loss.loss_mode, columns[reference], columns["advantages"], columns["loss_mask"],
        settings=policy_settings(config), draws=token_draws(keys, rows.responses, seed=seed), all_sum=engine.all_sum,
        rank=engine.dp_rank, world_size=engine.dp_size,
    )  # fmt: skip
