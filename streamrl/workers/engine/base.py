"""What an engine is: a model with its optimizer on some number of ranks, below any algorithm.

Every method is collective: all ranks call it together, also those without rows. Rows are split by `dp_rank`; the ranks
that share one (`sequence_parallel`) are given the same rows and find the same results, which count once (`collects`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from streamrl.workers.batch import MicroBatching, Rows

if TYPE_CHECKING:
    import torch

    from streamrl.weight_sync.shares import Share

Weights = Literal["current", "reference", "snapshot"]
"""current: those being trained; reference: as loaded, with LoRA the model without its adapters, else only of a frozen
engine (where they are the current ones); snapshot: as they were at the last `snapshot()`."""


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """Of one micro-batch: f[T] each, T response tokens row after row. A language model has log-probs and entropies
    (after temperature), a value model values: of the state before each token, that is at the place that predicts it."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    row: torch.Tensor
    """i64[T]."""
    columns: dict[str, torch.Tensor]
    """The rows' columns, flat, [T]."""
    values: torch.Tensor | None = None
    """With values, the first two are None."""


LossFunction = Callable[[TokenOutputs], "tuple[torch.Tensor, dict[str, torch.Tensor]]"]
"""Returns this micro-batch's additive part of the global loss, and sums that are added up over micro-batches."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`sums` are this rank's; `grad_norm` is global and before clipping, NaN where the loss is not finite; a step
    with a non-finite one, or on a mini-batch that has drifted beyond `target_kl`, is not taken."""

    sums: dict[str, float]
    grad_norm: float
    taken: bool
    micro_batches: int
    tokens: int
    """That went through the model here, without padding."""
    peaks: dict[str, float] = field(default_factory=dict)
    """Of what does not add up, the largest here; left to who gives the loss."""


class Engine(Protocol):
    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    collects: bool
    """This rank is the first of those that share its rows: what it returns counts."""

    def initialize(self) -> dict[str, float | str]:
        """Load the model. What it is, for the log: parameters, trainable, vocab_size, model_type, world_size, device,
        seconds."""
        ...

    def infer(
        self, rows: Rows, *, temperature: float, micro: MicroBatching, weights: Weights = "current"
    ) -> dict[str, list[np.ndarray]]:
        """Of the response tokens, [R] per row, f32 (f64 with model_dtype=fp64): "log_probs" and "entropy" of a language
        model, "values" of a value model; "scores" [1] per row of a reward model. Raises ValueError for weights that the
        engine does not have."""
        ...

    def train_batch(
        self, rows: Rows, loss: LossFunction, *, lr: float, temperature: float, micro: MicroBatching
    ) -> StepOutput:
        """One optimizer step on this rank's share of a mini-batch. Raises RuntimeError when frozen."""
        ...

    def all_sum(self, values: np.ndarray) -> np.ndarray:
        """f64, summed over the data-parallel ranks: each row counts once."""
        ...

    def snapshot(self) -> None:
        """Keep a copy of the trained weights, each rank its shard, in CPU memory; it replaces the last one."""
        ...

    def full_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full parameters on rank 0's CPU under Hugging Face names, adapters merged, one at a time; nothing on the
        other ranks."""
        ...

    def shares(self) -> Iterator[Share]:
        """What this rank is to publish of each parameter, under Hugging Face names, adapters merged: the ranks' shares
        together are all of it, once. Views of the parameters where they are (with adapters: copies)."""
        ...

    def save(self, directory: str) -> None: ...

    def hold(self, directory: str) -> Callable[[], None]:
        """Copy what `save` writes into host memory; what is returned writes it, in any thread and not collectively,
        whatever the engine does meanwhile. The copies of the last call are overwritten."""
        ...

    def load(self, directory: str) -> None: ...

    def close(self) -> None: ...
