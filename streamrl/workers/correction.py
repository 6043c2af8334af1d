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
from streamrl.algorithms.rollout_correction import (
    bounded,
    importance_ratios,
    normalised,
    of_row,
    rejection_mask,
    weight_sums,
)
from streamrl.algorithms.rollout_diagnostics import weight_spread
from streamrl.algorithms.thresholds import parse_threshold, rejection_rules
from streamrl.config.sections.actor import ActorConfig
from streamrl.config.sections.algorithm import RolloutCorrectionConfig
from streamrl.workers.batch import Rows, unflatten
from streamrl.workers.losses import policy_settings
from streamrl.workers.step_metrics import REJECTED_BY, Measured

if TYPE_CHECKING:
    from streamrl.workers.engine.base import Engine

AllSum = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Correction:
    config: RolloutCorrectionConfig

    def apply(self, rows: Rows, reference: str, all_sum: AllSum) -> Measured:
        """Collective. `reference` names the column of log-probs. For the metrics, over this rank's tokens."""
        config, measured = self.config, Measured()
        if config.rollout_is is None and config.rollout_rs is None:
            return measured
        log_probs, rollout, mask = (
            torch.from_numpy(rows.flat(n)) for n in (reference, "rollout_log_probs", "loss_mask")
        )
        row = torch.from_numpy(np.repeat(np.arange(len(rows)), rows.responses))
        kept = mask
        if config.rollout_rs is not None:
            rules = rejection_rules(config.rollout_rs, config.rollout_rs_threshold)
            kept, rejected = rejection_mask(log_probs, rollout, mask, row, rules)
            measured.sums |= {
                "rejected": float((mask - kept).sum()),
                "asked": float(mask.sum()),
                "rows_rejected": float((of_row("seq_sum", mask - kept, mask, row) > 0).sum()),
                "rows_asked": float((of_row("seq_sum", mask, mask, row) > 0).sum()),
                **{f"{REJECTED_BY}{statistic}": float(each.sum()) for statistic, each in rejected.items()},
            }
            rows.columns["loss_mask"] = unflatten(kept.numpy(), rows.responses)
        if (level := config.rollout_is) is not None:
            threshold = parse_threshold(config.rollout_is_threshold)
            # The ratio of a row is that of all it sampled, rejected tokens included; what counts is what was kept.
            ratios = importance_ratios(log_probs, rollout, mask, row, level=level)
            weights = bounded(ratios, threshold)
            spread = weight_spread(weights, ratios, kept, row, threshold=threshold)
            measured.sums |= {name: float(value) for name, value in spread.sums.items()}
            measured.peaks |= {name: float(value) for name, value in spread.peaks.items()}
            if config.rollout_is_batch_normalize:
                units = weight_sums(weights, kept, row, level=level).numpy()
                measured.sums |= {"is_norm_sum": float(units[0]), "is_norm_count": float(units[1])}
                weights = normalised(weights, torch.from_numpy(all_sum(units)))
            rows.columns["rollout_is_weights"] = unflatten(weights.numpy(), rows.responses)
        return measured


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
