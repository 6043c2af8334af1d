"""Importance weights and rejection, against loops over rows and tokens; what is rejected is in no denominator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.algorithms.aggregation import aggregation_weights
from streamrl.algorithms.rollout_correction import importance_weights, normalised, rejection_mask, weight_sums
from streamrl.algorithms.thresholds import STATISTICS, parse_threshold, rejection_rules
from tests.algorithms.ragged import Ragged, flat, row_of

SEEDS = range(4)


class Drifted:
    def __init__(self, seed: int) -> None:
        self.rows = Ragged(seed)
        self.rollout = self.rows.log_probs()
        self.old = self.rows.near(self.rollout, 0.5)

    def arguments(self, part: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        masks = self.rows.masks
        return flat(self.old, part), flat(self.rollout, part), flat(masks, part), row_of(masks, part)

    def log_ratios(self, i: int) -> list[float]:
        """Of row i's counting tokens."""
        return [float(p - q) for p, q, m in zip(self.old[i], self.rollout[i], self.rows.masks[i], strict=True) if m]

    def weights(self, i: int, level: str, threshold: float | tuple[float, float]) -> list[float]:
        logs = self.log_ratios(i)
        found = [math.exp(each) for each in logs] if level == "token" else [math.exp(math.fsum(logs))] * len(logs)
        if isinstance(threshold, tuple):
            return [w if threshold[0] <= w <= threshold[1] else 0.0 for w in found]
        return [min(w, threshold) for w in found]

    def per_row(self, values: torch.Tensor, part: list[int]) -> dict[int, list[float]]:
        """Of the counting tokens."""
        pieces = np.split(values.numpy(), np.cumsum([self.rows.lengths[i] for i in part])[:-1])
        return {i: piece[self.rows.masks[i] > 0].tolist() for i, piece in zip(part, pieces, strict=True)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("threshold", [2.0, 1.1, (0.5, 1.5)])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_the_truncated_or_masked_ratio_of_the_token_or_its_row(
    level: Any, threshold: Any, seed: int
) -> None:
    batch = Drifted(seed)
    for split in batch.rows.splits():
        for part in split:
            weights = importance_weights(*batch.arguments(part), level=level, threshold=threshold)
            for i, found in batch.per_row(weights, part).items():
                np.testing.assert_allclose(found, batch.weights(i, level, threshold), rtol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_have_mean_one_over_the_mini_batch_however_it_is_split(level: Any, seed: int) -> None:
    batch = Drifted(seed)
    rows = [batch.weights(i, level, 2.0) for i in range(batch.rows.rows)]
    units = [w for row in rows for w in (row if level == "token" else row[:1])]
    mean = math.fsum(units) / len(units)
    for split in batch.rows.splits():
        weights = [importance_weights(*batch.arguments(part), level=level, threshold=2.0) for part in split]
        masks = [batch.arguments(part)[2:] for part in split]
        sums = [weight_sums(each, mask, row, level=level) for each, (mask, row) in zip(weights, masks, strict=True)]
        total = torch.stack(sums).sum(0)
        for each, part in zip(weights, split, strict=True):
            for i, found in batch.per_row(normalised(each, total), part).items():
                np.testing.assert_allclose(found, [w / mean for w in rows[i]], rtol=1e-9)


def test_weights_that_are_all_zero_stay_zero() -> None:
    assert normalised(torch.zeros(3), torch.tensor([0.0, 3.0])).tolist() == [0.0] * 3


def test_weights_carry_no_gradient_and_are_finite() -> None:
    old = torch.tensor([-1.0, 0.0, -500.0], requires_grad=True)
    rollout, mask, row = torch.tensor([-1.0, -500.0, 0.0]), torch.ones(3), torch.zeros(3, dtype=torch.long)
    for level in ("token", "sequence"):
        found = importance_weights(old, rollout, mask, row, level=level, threshold=1e9)
        assert not found.requires_grad
        assert torch.isfinite(found).all()


def statistic(name: str, log_ratios: list[float]) -> list[float]:
    """Per counting token of a row."""
    kind = {
        "k1": lambda x: -x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(x) - 1 - x,
    }[name[-2:]]
    values = [kind(x) for x in log_ratios]
    if name.startswith("token"):
        return values
    whole = {"seq_sum": math.fsum, "seq_mean": lambda v: math.fsum(v) / len(v), "seq_max": max}[name[:-3]](values)
    return [whole] * len(values)


CASES = {
    "token_k1": "0.8_1.3", "token_k2": 0.05, "token_k3": 0.05,
    "seq_sum_k1": "0.5_1.6", "seq_sum_k2": 0.4, "seq_sum_k3": 0.4,
    "seq_mean_k1": "0.95_1.1", "seq_mean_k2": 0.1, "seq_mean_k3": 0.1,
    "seq_max_k2": 0.3, "seq_max_k3": 0.3,
}  # fmt: skip


def in_bounds(name: str, value: float, threshold: float | str) -> bool:
    if not name.endswith("k1"):
        return value <= float(threshold)
    low, high = map(float, str(threshold).split("_"))
    return low <= math.exp(value) <= high


def reject(
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], statistics: str, thresholds: float | str
) -> torch.Tensor:
    return rejection_mask(*arguments, rejection_rules(statistics, thresholds)).mask


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", STATISTICS)
def test_what_a_statistic_puts_out_of_bounds_leaves_the_mask(name: str, seed: int) -> None:
    batch = Drifted(seed)
    for split in batch.rows.splits():
        for part in split:
            kept = reject(batch.arguments(part), name, CASES[name])
            assert not (kept > batch.arguments(part)[2]).any()
            for i, found in batch.per_row(kept, part).items():
                values = statistic(name, logs) if (logs := batch.log_ratios(i)) else []
                assert found == [float(in_bounds(name, value, CASES[name])) for value in values]


@pytest.mark.parametrize("name", STATISTICS)
def test_each_case_above_rejects_some_and_keeps_some(name: str) -> None:
    kept = asked = 0.0
    for seed in SEEDS:
        batch = Drifted(seed)
        arguments = batch.arguments(list(range(batch.rows.rows)))
        kept += float(reject(arguments, name, CASES[name]).sum())
        asked += batch.rows.tokens
    assert 0 < kept < asked


def test_several_statistics_must_all_be_in_bounds_each_on_the_mask_as_given() -> None:
    batch = Drifted(1)
    arguments = batch.arguments(list(range(batch.rows.rows)))
    names = ["token_k2", "seq_mean_k1"]
    both = rejection_mask(*arguments, rejection_rules(",".join(names), "0.05, 0.95_1.1"))
    each = [rejection_mask(*arguments, rejection_rules(name, CASES[name])) for name in names]
    torch.testing.assert_close(both.mask, each[0].mask * each[1].mask)
    for name, alone in zip(names, each, strict=True):
        torch.testing.assert_close(both.rejected[name], arguments[2] - alone.mask)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_rejected_tokens_and_rows_leave_numerator_and_denominator(mode: Any) -> None:
    """The aggregate over the rejected mini-batch is that of a mini-batch in which they never were."""
    batch = Drifted(2)
    everything = list(range(batch.rows.rows))
    _, _, mask, row = batch.arguments(everything)
    kept = reject(batch.arguments(everything), "token_k2,seq_mean_k2", "0.2,0.12")
    loss = torch.linspace(1.0, 2.0, len(mask), dtype=torch.float64)
    per_row = [[float(x) for x, m, r in zip(loss, kept, row, strict=True) if m and r == i] for i in everything]
    counting = [values for values in per_row if values]
    assert 0 < len(counting) < batch.rows.sequences
    tokens = float(sum(map(len, counting)))
    expected = {
        "token-mean": math.fsum(map(math.fsum, counting)) / tokens,
        "seq-mean-token-mean": math.fsum(math.fsum(values) / len(values) for values in counting) / len(counting),
        "seq-mean-token-sum": math.fsum(map(math.fsum, counting)) / len(counting),
    }[mode]
    weights = aggregation_weights(kept, row, mode=mode, tokens=tokens, sequences=len(counting))
    assert float((weights * loss).sum()) == pytest.approx(expected, rel=1e-12)
    assert (weights[kept == 0] == 0).all()


def test_everything_rejected_costs_nothing() -> None:
    batch = Drifted(0)
    arguments = batch.arguments(list(range(batch.rows.rows)))
    kept, row = reject(arguments, "token_k2", 1e-12), arguments[3]
    assert not kept.any()
    weights = aggregation_weights(kept, row, mode="seq-mean-token-mean", tokens=0.0, sequences=0.0)
    assert (weights == 0).all()


def test_log_probs_that_are_no_numbers_are_rejected_not_learned_from() -> None:
    old, rollout = torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0])
    found = rejection_mask(old, rollout, torch.ones(2), torch.tensor([0, 1]), rejection_rules("seq_mean_k1", 2.0))
    assert found.mask.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("given", "expected"), [(2, 2.0), ("2.5", 2.5), ("0.5_5.0", (0.5, 5.0)), ("0_3", (0.0, 3.0))])
def test_a_threshold_is_a_number_or_two(given: Any, expected: Any) -> None:
    assert parse_threshold(given) == expected


@pytest.mark.parametrize("given", ["", "a", "3_2", "1_2_3", 0.0, -1, math.nan, "inf", "-1_2"])
def test_what_is_no_threshold_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="expected a number above 0"):
        parse_threshold(given)


@pytest.mark.parametrize(
    ("statistics", "thresholds", "message"),
    [
        ("token_k4", 2.0, "known: token_k1"),
        ("seq_max_k1", 2.0, r"unknown \['seq_max_k1'\]"),
        (" ,", 2.0, "known: token_k1"),
        ("token_k1", None, "needs rollout_rs_threshold"),
        ("token_k1,token_k2,token_k3", "2,3", "3 statistics, rollout_rs_threshold has 2"),
        ("token_k2", "0.5_2", "an upper bound only"),
        ("token_k1", 0.5, "at least 1"),
    ],
)
def test_what_is_no_rule_is_refused(statistics: str, thresholds: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rejection_rules(statistics, thresholds)


def test_one_number_bounds_a_ratio_from_both_sides_and_one_threshold_serves_all() -> None:
    rules = rejection_rules("token_k1, seq_mean_k3", "2")
    assert [(rule.statistic, rule.scope, rule.estimator) for rule in rules] == [
        ("token_k1", "token", "k1"),
        ("seq_mean_k3", "seq_mean", "k3"),
    ]
    assert (rules[0].low, rules[0].high) == pytest.approx((-math.log(2), math.log(2)))
    assert (rules[1].low, rules[1].high) == (-math.inf, 2.0)
