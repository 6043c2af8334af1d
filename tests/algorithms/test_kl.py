"""KL estimates against exact expectations and definitions; the controllers against their formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.algorithms.aggregation import aggregation_weights
from streamrl.algorithms.kl import KL_ESTIMATORS, k1, k2, k3, kl_estimator
from streamrl.algorithms.kl_control import AdaptiveKL, KLController, kl_controller
from streamrl.algorithms.kl_reward import penalised_rewards
from tests.algorithms.ragged import Ragged, flat, row_of

DEFINITIONS = {
    "k1": lambda p, q: p - q,
    "kl": lambda p, q: p - q,
    "abs": lambda p, q: abs(p - q),
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "mse": lambda p, q: (p - q) ** 2 / 2,
    "k3": lambda p, q: math.exp(q - p) - 1 - (q - p),
    "low_var_kl": lambda p, q: math.exp(q - p) - 1 - (q - p),
}


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_an_estimate_is_what_its_definition_says_however_rows_are_split(name: str) -> None:
    rows = Ragged(seed=4)
    policy = rows.log_probs()
    reference = rows.near(policy)
    define = DEFINITIONS[name.removesuffix("+")]
    tokens = zip(*map(np.concatenate, (policy, reference, rows.masks)), strict=True)
    expected = sum(m * define(float(p), float(q)) for p, q, m in tokens) / rows.tokens
    for split in rows.splits():
        total = 0.0
        for part in split:
            mask = flat(rows.masks, part)
            row = row_of(policy, part)
            weights = aggregation_weights(mask, row, mode="token-mean", tokens=rows.tokens, sequences=1)
            total += float((kl_estimator(name)(flat(policy, part), flat(reference, part)) * weights).sum())
        assert total == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_a_straight_through_form_has_the_gradient_of_k2(name: str) -> None:
    rows = Ragged(seed=5)
    policy = flat(rows.log_probs()).requires_grad_()
    reference = policy.detach() + torch.linspace(-1, 1, len(policy), dtype=torch.float64)
    [found] = torch.autograd.grad(kl_estimator(f"{name}+")(policy, reference).sum(), policy)
    torch.testing.assert_close(found, policy.detach() - reference)  # d/dlogp (logp - logq)^2 / 2


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative() -> None:
    """Exact expectation over a categorical distribution instead of samples."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    kl = float((p.exp() * (p - q)).sum())
    assert float((p.exp() * k1(p, q)).sum()) == pytest.approx(kl)
    assert float((p.exp() * k3(p, q)).sum()) == pytest.approx(kl)
    assert (k3(p, q) >= 0).all()
    near = (p + 1e-3 * q).log_softmax(0)
    assert float((p.exp() * k2(p, near)).sum()) == pytest.approx(float((p.exp() * (p - near)).sum()), rel=1e-2)


@pytest.mark.parametrize("name", ["k2", "k1+", "k3+"])
def test_the_expected_gradient_of_k2_and_of_straight_through_forms_is_that_of_the_kl(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(20, generator=generator, dtype=torch.float64, requires_grad=True)
    q = torch.randn(20, generator=generator, dtype=torch.float64).log_softmax(0)
    p = logits.log_softmax(0)
    [exact] = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    [found] = torch.autograd.grad((p.detach().exp() * kl_estimator(name)(p, q)).sum(), logits)
    torch.testing.assert_close(found, exact)


def test_the_expected_gradient_of_k1_is_zero() -> None:
    """Why k1 in a loss needs its straight-through form."""
    logits = torch.randn(20, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    p = logits.log_softmax(0)
    [found] = torch.autograd.grad((p.detach().exp() * k1(p, torch.full_like(p, -3.0))).sum(), logits)
    torch.testing.assert_close(found, torch.zeros_like(found))


def test_k3_of_an_exploded_ratio_is_finite() -> None:
    assert torch.isfinite(k3(torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]))).all()


def test_an_unknown_estimator_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'k4'; known: k1, .*low_var_kl\+"):
        kl_estimator("k4")


@pytest.mark.parametrize("name", ["kl", "low_var_kl+"])
def test_the_penalty_lowers_the_reward_of_each_sampled_token(name: str) -> None:
    rows = Ragged(seed=6)
    rewards, policy = rows.column(), rows.log_probs()
    reference = rows.near(policy)
    found, total = penalised_rewards(rewards, policy, reference, rows.masks, coef=0.3, estimator=name)
    means = []
    for i, mask in enumerate(rows.masks):
        define = DEFINITIONS[name.removesuffix("+")]
        kl = [m * define(float(p), float(q)) for p, q, m in zip(policy[i], reference[i], mask, strict=True)]
        np.testing.assert_allclose(found[i], [r - 0.3 * k for r, k in zip(rewards[i], kl, strict=True)], rtol=1e-9)
        if mask.any():
            means.append(math.fsum(kl) / mask.sum())
    np.testing.assert_allclose(total, [math.fsum(means), len(means)], rtol=1e-9)
    for split in rows.splits():
        columns = (rewards, policy, reference, rows.masks)
        parts = [[[column[i] for i in part] for column in columns] for part in split]
        sums = [penalised_rewards(*part, coef=0.3, estimator=name)[1] for part in parts]
        np.testing.assert_allclose(np.sum(sums, axis=0), total, rtol=1e-9)


def control(kind: str = "adaptive", kl_coef: float = 0.01, horizon: int = 1000) -> KLController:
    return kl_controller(kind, kl_coef=kl_coef, target_kl=0.1, horizon=horizon)


@pytest.mark.parametrize(
    ("kl", "rows", "factor"),
    [(0.1, 64, 1.0), (0.11, 100, 1.01), (0.09, 100, 0.99), (5.0, 100, 1.02), (0.0, 100, 0.98), (-3.0, 100, 0.98)],
)
def test_the_adaptive_coefficient_moves_in_proportion_to_the_error(kl: float, rows: int, factor: float) -> None:
    controller = control()
    controller.update(kl, rows)
    assert controller.coef == pytest.approx(0.01 * factor)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_leaves_the_coefficient(kl: float) -> None:
    controller = control()
    controller.update(kl, 100)
    assert controller.coef == 0.01


def test_a_huge_batch_does_not_turn_the_penalty_into_a_reward() -> None:
    controller = control(horizon=10)
    controller.update(0.0, 1000)
    assert controller.coef == 0.0


def test_the_fixed_coefficient_stays() -> None:
    controller = control("fixed")
    controller.update(9.0, 1000)
    assert controller.coef == 0.01


def test_a_resumed_controller_goes_on_where_it_was() -> None:
    first, second = control(), control(kl_coef=7.0)
    first.update(0.5, 300)
    second.load(first.state())
    assert second.coef == first.coef != 0.01
    fixed = control("fixed", kl_coef=7.0)
    fixed.load(first.state())
    assert fixed.coef == 7.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: control("pid"), "'pid'; known: fixed, adaptive"),
        (lambda: AdaptiveKL(0.1, 0.0, 10), "target_kl=0"),
    ],
)
def test_what_is_no_controller_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
