"""The critic's loss, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from streamrl.algorithms.aggregation import aggregation_weights
from streamrl.algorithms.value_loss import value_loss
from tests.algorithms.ragged import Ragged, flat, row_of


def by_definition(value: float, old: float, target: float, cliprange: float) -> float:
    near = old + min(max(value - old, -cliprange), cliprange)
    return 0.5 * max((value - target) ** 2, (near - target) ** 2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cliprange", [0.2, 0.5])
def test_value_loss_is_the_larger_squared_error_however_rows_are_split(seed: int, cliprange: float) -> None:
    rows = Ragged(seed)
    old, returns = rows.column(), rows.column()
    values = rows.near(old, 0.6)
    tokens = zip(*map(np.concatenate, (values, old, returns, rows.masks)), strict=True)
    expected = sum(m * by_definition(v, o, r, cliprange) for v, o, r, m in tokens) / rows.tokens
    for split in rows.splits():
        total = 0.0
        for part in split:
            mask = flat(rows.masks, part)
            loss = value_loss(flat(values, part), flat(old, part), flat(returns, part), cliprange_value=cliprange).loss
            weights = aggregation_weights(
                mask, row_of(values, part), mode="token-mean", tokens=rows.tokens, sequences=rows.sequences
            )
            total += float((loss * weights).sum())
        assert total == pytest.approx(expected, rel=1e-9)


def test_a_value_beyond_the_clip_gets_no_gradient_towards_its_target() -> None:
    values = torch.tensor([1.0, -1.0, 0.1], requires_grad=True)
    found = value_loss(values, torch.zeros(3), torch.tensor([2.0, 2.0, 2.0]), cliprange_value=0.5)
    found.loss.sum().backward()
    assert found.clipped.tolist() == [1.0, 0.0, 0.0]
    assert values.grad is not None
    np.testing.assert_allclose(values.grad.numpy(), [0.0, -3.0, -1.9], rtol=1e-6)
