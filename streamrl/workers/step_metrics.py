"""From the sums and peaks of an update's optimizer steps to the actor's metrics, which the group merges over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from streamrl.single_controller.metrics import Correlation, Effective, Low, Mean, Metric, Peak, Spread, Total
from streamrl.workers.engine.base import StepOutput

OF_STEPS = {"actor/pg_loss": "pg_loss", "actor/loss": "loss", "actor/entropy_loss": "entropy_loss",
            "actor/kl_loss": "kl_loss", "actor/distillation_loss": "distillation_loss"}  # fmt: skip
"""Metric -> sum of a step that is a mean over the mini-batch already."""
CORR = "rollout_corr"
IS = f"{CORR}/rollout_is"
OF_COUNTED = {
    "tokens": {
        "actor/entropy": "entropy", "actor/ppo_kl": "ppo_kl", "actor/pg_clipfrac": "pg_clipfrac",
        "actor/pg_clipfrac_lower": "pg_clipfrac_lower", "actor/pg_covfrac": "pg_covfrac",
        f"{CORR}/kl": "rollout_kl", f"{CORR}/k3_kl": "rollout_k3_kl", f"{CORR}/chi2_token": "rollout_chi2_token",
        "training/rollout_probs_diff_mean": "rollout_probs_diff",
    },
    "rollout_rows": {
        f"{CORR}/chi2_seq": "rollout_chi2_seq",
        **{
            f"{CORR}/{name}": name
            for name in ("training_ppl", "rollout_ppl", "training_log_ppl", "rollout_log_ppl", "log_ppl_diff",
                         "log_ppl_abs_diff", "ppl_ratio")
        },
    },
    "is_tokens": {
        f"{IS}_mean": "is_sum", f"{IS}_ratio_fraction_high": "is_high", f"{IS}_ratio_fraction_low": "is_low",
    },
    "is_rows": {
        f"{IS}_seq_mean": "is_seq_sum", f"{IS}_seq_fraction_high": "is_seq_high",
        f"{IS}_seq_fraction_low": "is_seq_low",
    },
    "is_norm_count": {f"{IS}_batch_norm_factor": "is_norm_sum"},
    "asked": {f"{CORR}/rollout_rs_masked_fraction": "rejected"},
    "rows_asked": {f"{CORR}/rollout_rs_seq_masked_fraction": "rows_rejected"},
}  # fmt: skip
"""Sum that counts what a mean ranges over -> {metric: sum}."""
SPREADS: dict[str, tuple[type[Spread | Effective], str, str, str]] = {
    f"{IS}_std": (Spread, "is_tokens", "is_sum", "is_squares"),
    f"{IS}_eff_sample_size": (Effective, "is_tokens", "is_sum", "is_squares"),
    f"{IS}_seq_std": (Spread, "is_rows", "is_seq_sum", "is_seq_squares"),
    "training/rollout_probs_diff_std": (Spread, "tokens", "rollout_probs_diff", "rollout_probs_diff_squared"),
}
"""Metric -> its kind, and the sums of number, value and square."""
PROBS = ("tokens", "probs", "rollout_probs", "probs_squared", "rollout_probs_squared", "probs_product")
"""Sums that Pearson's correlation of the two policies' probabilities follows from."""
PEAKS = {
    f"{CORR}/log_ppl_diff_max": "log_ppl_diff", "training/rollout_probs_diff_max": "rollout_probs_diff",
    f"{IS}_max": "is_max", f"{IS}_seq_max": "is_seq_max", f"{IS}_seq_max_deviation": "is_seq_deviation",
}  # fmt: skip
LOWS = {f"{CORR}/log_ppl_diff_min": "log_ppl_diff_low", f"{IS}_min": "is_min", f"{IS}_seq_min": "is_seq_min"}
"""Metric -> peak of its negative."""


REJECTED_BY = "rejected_by/"
"""Prefix of the sums of what each statistic rejected."""


@dataclass(slots=True)
class Measured:
    """Of a mini-batch's rows on this rank: sums add up, of peaks the largest counts."""

    sums: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)


def step_metrics(steps: Sequence[StepOutput], corrections: Sequence[Measured], dp_size: int) -> dict[str, Metric]:
    """Of this rank. What nothing has measured, and peaks of nothing, are left out."""
    sums: dict[str, float] = dict.fromkeys(("pg_loss", "loss", "entropy_loss", "entropy", "ppo_kl", "tokens"), 0.0)
    peaks: dict[str, float] = {}
    for part in (*steps, *corrections):
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in part.peaks.items():
            peaks[name] = max(peaks.get(name, -math.inf), value)
    each = len(steps) / dp_size
    metrics: dict[str, Metric] = {name: Mean(sums[key], each) for name, key in OF_STEPS.items() if key in sums}
    for count, means in OF_COUNTED.items():
        metrics |= {name: Mean(sums[key], sums[count]) for name, key in means.items() if key in sums}
    for name, (kind, *parts) in SPREADS.items():
        if all(part in sums for part in parts):
            metrics[name] = kind(*(sums[part] for part in parts))
    if all(part in sums for part in PROBS):
        metrics["training/rollout_actor_probs_pearson_corr"] = Correlation(*(sums[part] for part in PROBS))
    if "is_tokens" in sums:
        metrics[f"{IS}_oob_ratio"] = Mean(sums["is_high"] + sums["is_low"], sums["is_tokens"])
    for name, value in sums.items():
        if name.startswith(REJECTED_BY):
            statistic = name.removeprefix(REJECTED_BY)
            metrics[f"{CORR}/rollout_rs_{statistic}_masked_fraction"] = Mean(value, sums["asked"])
    there = {name for name, value in peaks.items() if math.isfinite(value)}
    metrics |= {name: Peak(peaks[key]) for name, key in PEAKS.items() if key in there}
    metrics |= {name: Low(-peaks[key]) for name, key in LOWS.items() if key in there}
    taken = [step.grad_norm for step in steps if step.taken]
    metrics["actor/grad_norm"] = Mean(sum(taken), len(taken))
    metrics["actor/optimizer_steps"] = Mean(len(taken))
    metrics["actor/steps_not_finite"] = Mean(sum(not np.isfinite(step.grad_norm) for step in steps))
    metrics["actor/computed/tokens"] = Total(sum(step.tokens for step in steps))
    return metrics
