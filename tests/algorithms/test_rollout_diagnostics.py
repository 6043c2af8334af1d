"""Diagnostics of the rollout correction: every figure against a loop over rows and tokens, under any cut into parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.algorithms.rollout_correction import bounded, importance_ratios
from streamrl.algorithms.rollout_diagnostics import Figures, policy_gap, weight_spread
from streamrl.single_controller.metrics import merge_metrics
from streamrl.workers.step_metrics import Measured, step_metrics
from tests.algorithms.test_rollout_correction import SEEDS, Drifted


def measured(figures: Figures) -> Measured:
    sums, peaks = ({name: float(value) for name, value in each.items()} for each in figures)
    return Measured(sums, peaks)


def metrics_of(parts: list[Measured], prefix: str) -> dict[str, float]:
    """As if every part were a rank of its own."""
    merged = merge_metrics([step_metrics([], [part], 1) for part in parts])
    return {name.removeprefix(prefix): value for name, value in merged.items() if name.startswith(prefix)}


def gap_expected(batch: Drifted) -> dict[str, float]:
    rows = [(i, batch.log_ratios(i)) for i in range(batch.rows.rows)]
    rows = [(i, logs) for i, logs in rows if logs]
    tokens = [each for _, logs in rows for each in logs]
    of = {
        name: [-math.fsum(p[i][batch.rows.masks[i] > 0]) / len(logs) for i, logs in rows]
        for name, p in (("training", batch.old), ("rollout", batch.rollout))
    }
    gaps = [t - r for t, r in zip(of["training"], of["rollout"], strict=True)]

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    return {
        "kl": -mean(tokens), "k3_kl": mean([math.exp(x) - 1 - x for x in tokens]),
        "chi2_token": mean([math.exp(x) ** 2 for x in tokens]) - 1,
        "chi2_seq": mean([math.prod(math.exp(x) for x in logs) ** 2 for _, logs in rows]) - 1,
        "training_ppl": mean([math.exp(x) for x in of["training"]]), "training_log_ppl": mean(of["training"]),
        "rollout_ppl": mean([math.exp(x) for x in of["rollout"]]), "rollout_log_ppl": mean(of["rollout"]),
        "log_ppl_diff": mean(gaps), "log_ppl_abs_diff": mean([abs(x) for x in gaps]),
        "log_ppl_diff_max": max(gaps), "log_ppl_diff_min": min(gaps), "ppl_ratio": mean([math.exp(x) for x in gaps]),
    }  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gap_between_two_policies_is_that_of_a_loop_however_the_rows_are_split(seed: int) -> None:
    batch = Drifted(seed)
    for split in batch.rows.splits():
        parts = []
        for part in split:
            found = measured(policy_gap(*batch.arguments(part)))
            found.sums["tokens"] = float(batch.arguments(part)[2].sum())
            parts.append(found)
        assert metrics_of(parts, "rollout_corr/") == pytest.approx(gap_expected(batch), rel=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_differences_of_probabilities_have_mean_deviation_and_maximum(seed: int) -> None:
    batch = Drifted(seed)
    found = measured(policy_gap(*batch.arguments(list(range(batch.rows.rows)))))
    found.sums["tokens"] = batch.rows.tokens
    kept = [mask > 0 for mask in batch.rows.masks]
    away = np.concatenate([
        np.abs(np.exp(p[m]) - np.exp(q[m])) for p, q, m in zip(batch.old, batch.rollout, kept, strict=True)
    ])  # fmt: skip
    expected = {"mean": away.mean(), "std": away.std(), "max": away.max()}
    assert metrics_of([found], "training/rollout_probs_diff_") == pytest.approx(expected, rel=1e-9)
    pair = (np.concatenate([np.exp(p[m]) for p, m in zip(of, kept, strict=True)]) for of in (batch.old, batch.rollout))
    correlation = metrics_of([found], "training/rollout_actor_probs_pearson_")["corr"]
    assert correlation == pytest.approx(np.corrcoef(*pair)[0, 1], abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("threshold", [1.3, (0.7, 1.4)])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_spread_of_the_weights_is_that_of_a_loop_however_the_rows_are_split(
    level: Any, threshold: Any, seed: int
) -> None:
    batch = Drifted(seed)
    low, high = threshold if isinstance(threshold, tuple) else (1 / threshold, threshold)
    rows = [np.array(batch.weights(i, level, threshold)) for i in range(batch.rows.rows)]
    raw = np.concatenate([batch.weights(i, level, math.inf) for i in range(batch.rows.rows)])
    rows = [row for row in rows if len(row)]
    tokens, of_rows = np.concatenate(rows), np.array([row.mean() for row in rows])
    above, below = (raw > high).mean(), (raw < low).mean()
    expected = {
        "mean": tokens.mean(), "std": tokens.std(), "min": tokens.min(), "max": tokens.max(),
        "eff_sample_size": tokens.sum() ** 2 / (len(tokens) * (tokens**2).sum()),
        "ratio_fraction_high": above, "ratio_fraction_low": below, "oob_ratio": above + below,
        "seq_mean": of_rows.mean(), "seq_std": of_rows.std(), "seq_min": of_rows.min(), "seq_max": of_rows.max(),
        "seq_max_deviation": np.abs(of_rows - 1).max(), "seq_fraction_high": (of_rows > high).mean(),
        "seq_fraction_low": (of_rows < low).mean(),
    }  # fmt: skip
    for split in batch.rows.splits():
        parts = []
        for part in split:
            old, rollout, mask, row = batch.arguments(part)
            ratios = importance_ratios(old, rollout, mask, row, level=level)
            weights = bounded(ratios, threshold)
            parts.append(measured(weight_spread(weights, ratios, mask, row, threshold=threshold)))
        assert metrics_of(parts, "rollout_corr/rollout_is_") == pytest.approx(expected, rel=1e-9, abs=1e-8)


def test_what_does_not_count_is_in_no_figure_and_nothing_overflows() -> None:
    log_probs = torch.tensor([-1.0, -900.0, 0.0], requires_grad=True)
    rollout, row = torch.tensor([-1.0, 0.0, -900.0]), torch.tensor([0, 0, 1])
    sums, peaks = policy_gap(log_probs, rollout, torch.tensor([1.0, 0.0, 0.0]), row)
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(
        {**dict.fromkeys(sums, 0.0), "training_ppl": math.e, "rollout_ppl": math.e, "training_log_ppl": 1.0,
         "rollout_log_ppl": 1.0, "ppl_ratio": 1.0, "rollout_rows": 1.0,
         **dict.fromkeys(("probs", "rollout_probs"), math.exp(-1)),
         **dict.fromkeys(("probs_squared", "rollout_probs_squared", "probs_product"), math.exp(-2))}
    )  # fmt: skip
    everything = policy_gap(log_probs, rollout, torch.ones(3), row)
    assert all(math.isfinite(value) and not value.requires_grad for each in everything for value in each.values())
    nothing = policy_gap(log_probs, rollout, torch.zeros(3), row)
    assert all(float(value) == 0.0 for value in nothing.sums.values())
    assert all(float(value) == -math.inf for value in nothing.peaks.values())
    assert "rollout_corr/log_ppl_diff_max" not in step_metrics([], [measured(nothing)], 1)
    assert float(peaks["log_ppl_diff"]) == 0.0
