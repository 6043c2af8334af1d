"""Every policy loss on ragged rows, against loops over rows and tokens written from its paper, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.plugins import PluginError
from streamrl.algorithms.aggregation import aggregation_weights
from streamrl.algorithms.policy_losses import (
    NEEDS_SELECTION,
    POLICY_LOSSES,
    PolicyInputs,
    PolicyLoss,
    PolicyLossSettings,
    policy_loss,
)
from tests.algorithms.ragged import Ragged, flat, row_of

SETTINGS = [
    PolicyLossSettings(),
    PolicyLossSettings(clip_ratio_low=0.1, clip_ratio_high=0.4, clip_ratio_c=1.5, ppo_kl_coef=0.7, tau_neg=2.0),
]
Token = tuple[float, float, float, float]
"""log_prob, old_log_prob, advantage, selected: of one counting token."""


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def surrogate(ratio: float, advantage: float, s: PolicyLossSettings) -> float:
    """Minus the objective of PPO, eq. 7."""
    bounded = clip(ratio, 1 - s.clip_ratio_low, 1 + s.clip_ratio_high)
    return -min(ratio * advantage, bounded * advantage)


def by_vanilla(row: list[Token], s: PolicyLossSettings) -> list[float]:
    found = []
    for p, q, a, _ in row:
        loss = surrogate(math.exp(p - q), a, s)
        found.append(min(loss, -s.clip_ratio_c * a) if a < 0 else loss)
    return found


def by_gspo(row: list[Token], s: PolicyLossSettings) -> list[float]:
    ratio = math.exp(math.fsum(p - q for p, q, _, _ in row) / len(row))
    return [surrogate(ratio, a, s) for _, _, a, _ in row]


def by_cispo(row: list[Token], s: PolicyLossSettings) -> list[float]:
    return [-clip(math.exp(p - q), 1 - s.clip_ratio_low, 1 + s.clip_ratio_high) * a * p for p, q, a, _ in row]


def by_gmpo(row: list[Token], s: PolicyLossSettings) -> list[float]:
    product = 1.0
    for p, q, a, _ in row:
        bounded = clip(p - q, -s.clip_ratio_low, s.clip_ratio_high)
        product *= math.exp(min(p - q, bounded) if a > 0 else max(p - q, bounded))
    advantage = math.fsum(a for _, _, a, _ in row) / len(row)
    return [-advantage * product ** (1 / len(row))] * len(row)


def by_sapo(row: list[Token], s: PolicyLossSettings) -> list[float]:
    found = []
    for p, q, a, _ in row:
        tau = s.tau_pos if a > 0 else s.tau_neg
        found.append(-a * 4 / tau / (1 + math.exp(-tau * (math.exp(p - q) - 1))))
    return found


def by_gpg(row: list[Token], s: PolicyLossSettings) -> list[float]:
    return [-a * p for p, _, a, _ in row]


def by_clip_cov(row: list[Token], s: PolicyLossSettings) -> list[float]:
    return [0.0 if chosen else surrogate(math.exp(p - q), a, s) for p, q, a, chosen in row]


def by_kl_cov(row: list[Token], s: PolicyLossSettings) -> list[float]:
    return [-math.exp(p - q) * a + (s.ppo_kl_coef * abs(p - q) if chosen else 0.0) for p, q, a, chosen in row]


REFERENCES: dict[str, Callable[[list[Token], PolicyLossSettings], list[float]]] = {
    "vanilla": by_vanilla,
    "gspo": by_gspo,
    "cispo": by_cispo,
    "geo_mean": by_gmpo,
    "sapo": by_sapo,
    "gpg": by_gpg,
    "clip_cov": by_clip_cov,
    "kl_cov": by_kl_cov,
}


class Batch:
    """A mini-batch of ragged rows."""

    def __init__(self, seed: int) -> None:
        self.rows = Ragged(seed)
        self.old = self.rows.log_probs()
        self.new = self.rows.near(self.old)
        self.advantages = self.rows.column()
        self.selected = [(self.rows.rng.random(length) < 0.3).astype(np.float64) for length in self.rows.lengths]

    def inputs(self, part: list[int] | None = None, *, grad: bool = False) -> PolicyInputs:
        return PolicyInputs(
            flat(self.new, part).requires_grad_(grad),
            flat(self.old, part),
            flat(self.advantages, part),
            flat(self.rows.masks, part),
            row_of(self.rows.masks, part),
            flat(self.selected, part),
        )

    def expected(self, name: str, settings: PolicyLossSettings) -> list[list[float]]:
        """Per row, the losses of its counting tokens."""
        found = []
        for columns in zip(self.new, self.old, self.advantages, self.selected, self.rows.masks, strict=True):
            kept = [tuple(map(float, values)) for *values, m in zip(*columns, strict=True) if m]
            found.append(REFERENCES[name](kept, settings) if kept else [])  # type: ignore[arg-type]
        return found

    def aggregate(
        self, name: str, settings: PolicyLossSettings, split: list[list[int]], mode: Any
    ) -> tuple[float, list[np.ndarray]]:
        """The loss of the whole mini-batch and its gradient per row, computed micro-batch by micro-batch."""
        total, gradients = 0.0, [np.zeros(0)] * self.rows.rows
        for part in split:
            inputs = self.inputs(part, grad=True)
            weights = aggregation_weights(
                inputs.mask, inputs.row, mode=mode, tokens=self.rows.tokens, sequences=self.rows.sequences, scale=9.0
            )
            loss = (policy_loss(name)(inputs, settings).loss * weights).sum()
            loss.backward()
            total += float(loss.detach())
            assert inputs.log_probs.grad is not None
            pieces = np.split(inputs.log_probs.grad.numpy(), np.cumsum([self.rows.lengths[i] for i in part])[:-1])
            for i, piece in zip(part, pieces, strict=True):
                gradients[i] = piece
        return total, gradients


def test_every_loss_is_compared_with_a_reference() -> None:
    assert set(POLICY_LOSSES.names()) == set(REFERENCES)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", REFERENCES)
def test_a_loss_is_what_its_paper_says_on_each_counting_token(
    name: str, settings: PolicyLossSettings, seed: int
) -> None:
    batch = Batch(seed)
    inputs = batch.inputs()
    found = policy_loss(name)(inputs, settings)
    expected = [value for row in batch.expected(name, settings) for value in row]
    np.testing.assert_allclose(found.loss[inputs.mask > 0].numpy(), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.log_ratio, inputs.log_probs - inputs.old_log_probs)


AGGREGATES: dict[str, Callable[[list[list[float]]], float]] = {
    "token-mean": lambda rows: math.fsum(map(math.fsum, rows)) / sum(map(len, rows)),
    "token-sum": lambda rows: math.fsum(map(math.fsum, rows)),
    "seq-mean-token-sum": lambda rows: math.fsum(map(math.fsum, rows)) / len(rows),
    "seq-mean-token-mean": lambda rows: math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows),
    "seq-mean-token-sum-norm": lambda rows: math.fsum(map(math.fsum, rows)) / len(rows) / 9.0,
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mode", AGGREGATES)
@pytest.mark.parametrize("name", REFERENCES)
def test_loss_and_gradient_of_a_mini_batch_do_not_depend_on_its_micro_batches(name: str, mode: str, seed: int) -> None:
    """Rows without a counting token (one with tool text only, one empty) are in no denominator."""
    batch, settings = Batch(seed), SETTINGS[1]
    expected = AGGREGATES[mode]([row for row in batch.expected(name, settings) if row])
    whole, gradients = batch.aggregate(name, settings, [list(range(batch.rows.rows))], mode)
    assert whole == pytest.approx(expected, rel=1e-9)
    for split in batch.rows.splits():
        found, pieces = batch.aggregate(name, settings, split, mode)
        assert found == pytest.approx(expected, rel=1e-9)
        for piece, gradient in zip(pieces, gradients, strict=True):
            np.testing.assert_allclose(piece, gradient, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", REFERENCES)
def test_what_stands_at_a_masked_token_moves_nothing(name: str) -> None:
    batch, settings = Batch(3), SETTINGS[0]
    whole = [list(range(batch.rows.rows))]
    loss, gradients = batch.aggregate(name, settings, whole, "seq-mean-token-mean")
    for column in (batch.new, batch.old, batch.advantages):
        for values, mask in zip(column, batch.rows.masks, strict=True):
            values[mask == 0] = -7.0 * batch.rows.rng.random(int((mask == 0).sum()))
    moved, others = batch.aggregate(name, settings, whole, "seq-mean-token-mean")
    assert moved == pytest.approx(loss, rel=1e-12)
    for gradient, other, mask in zip(gradients, others, batch.rows.masks, strict=True):
        np.testing.assert_allclose(gradient, other, rtol=1e-9, atol=1e-15)
        assert (gradient[mask == 0] == 0).all()


def constant_per_row(batch: Batch) -> None:
    for values in batch.advantages:
        values[:] = values[:1].sum()


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "sapo", "gpg", "geo_mean", "kl_cov"])
def test_on_policy_every_loss_has_the_gradient_of_the_policy_gradient(name: str) -> None:
    batch = Batch(6)
    batch.new = [values.copy() for values in batch.old]
    constant_per_row(batch)
    _, gradients = batch.aggregate(name, SETTINGS[0], [list(range(batch.rows.rows))], "seq-mean-token-mean")
    for gradient, advantages, mask in zip(gradients, batch.advantages, batch.rows.masks, strict=True):
        expected = -advantages * mask / max(mask.sum(), 1.0) / batch.rows.sequences
        np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-15)


def run(name: str, log_probs: Any, old: Any, advantages: Any, **settings: float) -> tuple[PolicyLoss, torch.Tensor]:
    """One row, all tokens counting; the loss and the gradient of its sum."""
    new = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    before, gain = (torch.tensor(values, dtype=torch.float64) for values in (old, advantages))
    inputs = PolicyInputs(new, before, gain, torch.ones_like(new), torch.zeros(len(new), dtype=torch.long))
    found = policy_loss(name)(inputs, PolicyLossSettings(**settings))
    [gradient] = torch.autograd.grad(found.loss.sum(), new)
    return found, gradient


def test_vanilla_has_no_gradient_exactly_where_a_clip_decides() -> None:
    batch = Batch(1)
    inputs = batch.inputs(grad=True)
    found = policy_loss("vanilla")(inputs, SETTINGS[0])
    [gradient] = torch.autograd.grad(found.loss.sum(), inputs.log_probs)
    decided = (found.shares["pg_clipfrac"] + found.shares["pg_clipfrac_lower"]) > 0
    assert decided.any()
    assert (~decided).any()
    assert (gradient[decided] == 0).all()
    expected = -inputs.advantages * found.log_ratio.exp()  # policy gradient with the importance ratio
    torch.testing.assert_close(gradient[~decided], expected[~decided])


def test_an_exploding_ratio_costs_at_most_c_times_the_advantage() -> None:
    found, gradient = run("vanilla", [0.0, 0.0], [-500.0, -500.0], [-1.0, 1.0])
    assert found.loss.tolist() == [3.0, pytest.approx(-1.2)]
    assert found.shares["pg_clipfrac_lower"].tolist() == [1.0, 0.0]
    assert torch.isfinite(gradient).all()


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    found, gradient = run("cispo", [0.0, -1.0], [-3.0, -1.0], [2.0, 2.0])
    np.testing.assert_allclose(gradient.numpy(), [-1.2 * 2.0, -2.0])
    assert found.shares["pg_clipfrac"].tolist() == [1.0, 0.0]


def test_gspo_clips_whole_rows_and_its_gradient_is_that_of_the_sequence_ratio() -> None:
    new, old, advantages = [-1.0, -0.5, -2.0], [-1.1, -0.4, -2.3], [1.5] * 3
    _, gradient = run("gspo", new, old, advantages, clip_ratio_high=1.0)
    ratio = math.exp(sum(np.subtract(new, old)) / 3)
    np.testing.assert_allclose(gradient.numpy(), [-1.5 * ratio] * 3)  # of sum_t L_t = 3 L, dL/dlogp_t = -A s / 3
    found, gradient = run("gspo", new, old, advantages, clip_ratio_high=0.01)
    assert found.shares["pg_clipfrac"].tolist() == [1.0] * 3
    assert (gradient == 0).all()


def test_clip_cov_gives_selected_tokens_no_gradient() -> None:
    inputs = Batch(2).inputs(grad=True)
    found = policy_loss("clip_cov")(inputs, SETTINGS[0])
    [gradient] = torch.autograd.grad(found.loss.sum(), inputs.log_probs)
    assert inputs.selected is not None
    assert (gradient[inputs.selected > 0] == 0).all()
    assert (gradient[inputs.selected == 0] != 0).any()


@pytest.mark.parametrize("name", sorted(NEEDS_SELECTION))
def test_a_covariance_loss_without_a_selection_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="select_by_covariance"):
        run(name, [0.0], [0.0], [1.0])


@pytest.mark.parametrize("name", REFERENCES)
def test_a_micro_batch_without_tokens_costs_nothing(name: str) -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    inputs = PolicyInputs(nothing, nothing, nothing, nothing, torch.zeros(0, dtype=torch.long), nothing)
    assert float(policy_loss(name)(inputs, SETTINGS[0]).loss.sum()) == 0.0


def test_a_loss_in_a_file_is_found_by_its_path(tmp_path: Any) -> None:
    file = tmp_path / "losses.py"
    file.write_text("def mine(inputs, settings):\n    return settings.clip_ratio_c * inputs.log_probs\n")
    found: Any = policy_loss(f"{file}:mine")(Batch(0).inputs([0]), SETTINGS[0])
    torch.testing.assert_close(found, 3.0 * Batch(0).inputs([0]).log_probs)
    with pytest.raises(PluginError, match="did you mean 'vanilla'"):
        policy_loss("vanila")
