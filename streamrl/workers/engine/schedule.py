"""The learning rate as a pure function of the training step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from streamrl.config.sections.actor import OptimConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """`warmup_steps` <= 0: none. `total_steps` None: constant only."""

    lr: float
    kind: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = -1
    total_steps: int | None = None
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "cosine" and not self.total_steps:
            raise ValueError(
                "lr_scheduler_type=cosine needs the number of training steps (trainer.total_training_steps)"
            )

    @classmethod
    def of(cls, optim: OptimConfig, total_steps: int | None) -> Schedule:
        return cls(optim.lr, optim.lr_scheduler_type, optim.lr_warmup_steps, total_steps, optim.min_lr_ratio)

    def at(self, step: int) -> float:
        """Rate of training step `step`, counted from 0. Warm-up is linear and never 0: step 0 gets lr / warmup_steps.
        After it cosine falls from lr to lr * min_lr_ratio, reached at the last step."""
        warmup = max(self.warmup_steps, 0)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.kind == "constant" or self.total_steps is None:
            return self.lr
        done = min((step - warmup) / max(self.total_steps - 1 - warmup, 1), 1.0)
        share = 0.5 * (1.0 + math.cos(math.pi * done))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * share)
