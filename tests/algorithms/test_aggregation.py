"""Averages over the global mini-batch, from their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamrl.algorithms.aggregation import aggregation_weights

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
