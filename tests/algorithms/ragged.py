"""Random ragged rows with masks, and the ways to split them into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class Ragged:
    """Some rows of 0 to 9 tokens, float64. Row 1 has no counting token; row 2 ends on tool text."""

    seed: int
    rows: int = 7
    masks: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.lengths = [int(self.rng.integers(1, 10)) for _ in range(self.rows - 1)] + [0]
        self.masks = [(self.rng.random(length) < 0.7).astype(np.float64) for length in self.lengths]
        self.masks[0][:] = 1.0
        self.masks[1][:] = 0.0
        self.masks[2] = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
        self.lengths[2] = 7

    def column(self, scale: float = 1.0, shift: float = 0.0) -> list[np.ndarray]:
        return [self.rng.normal(shift, scale, length) for length in self.lengths]

    def log_probs(self) -> list[np.ndarray]:
        return [-self.rng.exponential(1.5, length) for length in self.lengths]

    def near(self, log_probs: list[np.ndarray], scale: float = 0.4) -> list[np.ndarray]:
        """Another policy's log-probs of the same tokens."""
        return [values + self.rng.normal(0.0, scale, len(values)) for values in log_probs]

    @property
    def tokens(self) -> float:
        return float(sum(mask.sum() for mask in self.masks))

    @property
    def sequences(self) -> float:
        return float(sum(bool(mask.any()) for mask in self.masks))

    def splits(self) -> list[list[list[int]]]:
        """Of the rows into micro-batches: all in one, one each, and two at random in random order."""
        order = [int(i) for i in self.rng.permutation(self.rows)]
        cut = int(self.rng.integers(1, self.rows))
        return [[list(range(self.rows))], [[i] for i in order], [order[:cut], order[cut:]]]


def flat(column: list[np.ndarray], part: list[int] | None = None) -> torch.Tensor:
    """f64[T] of the rows in `part` (default: all), one after the other."""
    chosen = column if part is None else [column[i] for i in part]
    return torch.tensor(np.concatenate(chosen), dtype=torch.float64)


def row_of(column: list[np.ndarray], part: list[int] | None = None) -> torch.Tensor:
    """i64[T]: whose token each is, counted within `part`."""
    chosen = column if part is None else [column[i] for i in part]
    return torch.tensor([place for place, values in enumerate(chosen) for _ in values], dtype=torch.long)
