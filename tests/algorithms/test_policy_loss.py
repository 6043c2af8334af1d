"""Losses, weights and averages against float64 references written from the papers, token by token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.algorithms.kl import k1, k2, k3
from streamrl.algorithms.off_policy import age_mask, token_age
from streamrl.algorithms.policy_loss import aggregation_weights, importance_weights, vanilla


def surrogate(log_prob: float, old: float, advantage: float, low: float, high: float, c: float) -> float:
    """Minus the objective of PPO eq. 7, bounded below by c * A where A < 0 (dual-clip PPO, eq. 5)."""
    ratio = math.exp(log_prob - old)
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return -max(objective, c * advantage) if advantage < 0 else -objective


def tokens(seed: int, count: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    old = torch.tensor(-rng.exponential(2.0, count))
    return old + torch.tensor(rng.normal(0, 0.8, count)), old, torch.tensor(rng.normal(0, 1, count))


@pytest.mark.parametrize(("low", "high", "c"), [(0.2, 0.2, 3.0), (0.2, 0.28, 10.0), (0.1, 0.4, 1.5)])
def test_vanilla_is_the_clipped_surrogate_with_dual_clip(low: float, high: float, c: float) -> None:
    log_probs, old, advantages = tokens(0)
    found = vanilla(log_probs, old, advantages, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c)
    expected = [surrogate(*map(float, row), low, high, c) for row in zip(log_probs, old, advantages, strict=True)]
    np.testing.assert_allclose(found.loss.numpy(), expected, rtol=1e-12)


def test_gradient_vanishes_exactly_where_a_clip_decides() -> None:
    log_probs, old, advantages = tokens(1)
    log_probs.requires_grad_()
    found = vanilla(log_probs, old, advantages)
    [gradient] = torch.autograd.grad(found.loss.sum(), log_probs)
    decided = (found.clipped + found.clipped_lower) > 0
    assert decided.any()
    assert (~decided).any()
    assert (gradient[decided] == 0).all()
    expected = -advantages * (log_probs.detach() - old).exp()  # policy gradient with the importance ratio
    torch.testing.assert_close(gradient[~decided], expected[~decided])


def test_an_exploding_ratio_costs_at_most_c_times_the_advantage() -> None:
    log_probs = torch.tensor([0.0, 0.0], requires_grad=True)
    found = vanilla(log_probs, torch.tensor([-500.0, -500.0]), torch.tensor([-1.0, 1.0]))
    assert found.loss.tolist() == [3.0, pytest.approx(-1.2)]
    assert found.clipped_lower.tolist() == [1.0, 0.0]
    found.loss.sum().backward()
    assert torch.isfinite(log_probs.grad).all()  # type: ignore[arg-type]


def test_on_policy_the_loss_is_minus_the_advantage() -> None:
    log_probs, _, advantages = tokens(2)
    found = vanilla(log_probs, log_probs.detach(), advantages)
    torch.testing.assert_close(found.loss, -advantages)
    assert not found.clipped.any()


def test_importance_weights_truncate_or_mask_and_carry_no_gradient() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    rollout = torch.tensor([-1.0, -3.0, 0.0])
    found = importance_weights(old, rollout, threshold=2.0)
    np.testing.assert_allclose(found.numpy(), [1.0, 2.0, math.exp(-1)], rtol=1e-6)
    assert not found.requires_grad
    assert importance_weights(old, rollout, threshold=(0.5, 5.0)).tolist() == [1.0, 0.0, 0.0]


ROWS: list[tuple[list[float], list[int]]] = [
    ([1.0, 2.0, 3.0], [1, 1, 0]),
    ([4.0], [1]),
    ([5.0, 6.0], [0, 0]),
    ([7.0, 8.0, 9.0, 10.0], [0, 1, 1, 1]),
]


def expected_aggregate(mode: str) -> float:
    """From the definitions: means over what counts, rows without a counting token left out altogether."""
    kept = [[value for value, m in zip(values, mask, strict=True) if m] for values, mask in ROWS]
    kept = [row for row in kept if row]
    flat = [value for row in kept for value in row]
    return {
        "token-mean": sum(flat) / len(flat),
        "token-sum": sum(flat),
        "seq-mean-token-sum": sum(map(sum, kept)) / len(kept),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in kept) / len(kept),
        "seq-mean-token-sum-norm": sum(map(sum, kept)) / len(kept) / 16.0,
    }[mode]


MODES: Any = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 0], [2, 1]]])
def test_the_aggregate_is_that_of_the_global_mini_batch_however_it_is_split(mode: Any, split: list[list[int]]) -> None:
    total = 0.0
    for part in split:
        loss = torch.tensor([v for i in part for v in ROWS[i][0]], dtype=torch.float64)
        mask = torch.tensor([m for i in part for m in ROWS[i][1]], dtype=torch.float64)
        row = torch.tensor([place for place, i in enumerate(part) for _ in ROWS[i][0]])
        weights = aggregation_weights(mask, row, mode=mode, tokens=6, sequences=3, scale=16.0)
        total += float((weights * loss).sum())
    assert total == pytest.approx(expected_aggregate(mode), rel=1e-12)


def test_an_unknown_mode_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="seq-mean-token-mean"):
        aggregation_weights(torch.ones(1), torch.zeros(1, dtype=torch.long), mode="mean", tokens=1, sequences=1)  # type: ignore[arg-type]


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


def test_the_gradient_of_k2_is_that_of_the_kl() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(20, generator=generator, dtype=torch.float64, requires_grad=True)
    q = torch.randn(20, generator=generator, dtype=torch.float64).log_softmax(0)
    p = logits.log_softmax(0)
    [exact] = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    [found] = torch.autograd.grad((p.detach().exp() * k2(p, q)).sum(), logits)
    torch.testing.assert_close(found, exact)


def test_age_counts_from_the_version_being_trained_and_leaves_context_alone() -> None:
    versions = np.array([-1, 3, 5, 2, -1], np.int32)
    assert token_age(versions, 5).tolist() == [0, 2, 0, 3, 0]
    mask = np.array([0, 1, 1, 1, 0])
    assert age_mask(mask, versions, version=5, max_age=2).tolist() == [0, 1, 1, 0, 0]
    assert age_mask(mask, versions, version=5, max_age=0).tolist() == [0, 0, 1, 0, 0]
