"""What an engine is: a model with its optimizer on some number of ranks, below any algorithm.

Every method is collective: all ranks call it together, also those without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from streamrl.workers.batch import Rows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """Of one micro-batch: f[T] each, T response tokens row after row, after temperature."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    row: torch.Tensor
    """i64[T]."""
    columns: dict[str, torch.Tensor]
    """The rows' columns, flat, f32[T]."""


LossFunction = Callable[[TokenOutputs], "tuple[torch.Tensor, dict[str, torch.Tensor]]"]
"""Returns this micro-batch's additive part of the global loss, and sums that are added up over micro-batches."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`sums` are this rank's; `grad_norm` is global and before clipping; a step with a non-finite one, or on
    a mini-batch that has drifted beyond `actor.target_kl`, is not taken."""

    sums: dict[str, float]
    grad_norm: float
    taken: bool
    micro_batches: int
    tokens: int
    """That went through the model here, without padding."""


class Engine(Protocol):
    rank: int
    world_size: int

    def initialize(self) -> dict[str, float | str]:
        """Load the model. What it is, for the log."""
        ...

    def infer(self, rows: Rows, *, temperature: float, max_tokens: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Log-probs and entropies of the response tokens: f32[R] per row each."""
        ...

    def train_batch(
        self, rows: Rows, loss: LossFunction, *, lr: float, temperature: float, max_tokens: int
    ) -> StepOutput:
        """One optimizer step on this rank's share of a mini-batch."""
        ...

    def all_sum(self, values: np.ndarray) -> np.ndarray:
        """f64, summed over ranks."""
        ...

    def full_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full parameters on rank 0's CPU under Hugging Face names, one at a time; nothing on the other ranks."""
        ...

    def save(self, directory: str) -> None: ...

    def load(self, directory: str) -> None: ...

    def close(self) -> None: ...
