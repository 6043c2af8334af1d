"""The learning rate as a pure function of the training step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from streamrl.config.sections.actor import OptimConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """`warmup_steps` <= 0: `warmup_ratio` of all steps. `total_steps` None: constant, and without a ratio."""

    lr: float
    kind: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = -1
    total_steps: int | None = None
    min_lr_ratio: float = 0.0
    warmup_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not self.total_steps and (self.kind == "cosine" or self.warmup_ratio):
            what = "lr_scheduler_type=cosine" if self.kind == "cosine" else "lr_warmup_steps_ratio"
            raise ValueError(f"{what} needs the number of training steps (trainer.total_training_steps)")

    @classmethod
    def of(cls, optim: OptimConfig, total_steps: int | None) -> Schedule:
        return cls(
            optim.lr, optim.lr_scheduler_type, optim.lr_warmup_steps, total_steps, optim.min_lr_ratio,
            optim.lr_warmup_steps_ratio,
        )  # fmt: skip

    def at(self, step: int) -> float:
        """Rate of training step `step`, counted from 0. Warm-up is linear and never 0: step 0 gets lr / warmup_steps.
        After it cosine falls from lr to lr * min_lr_ratio, reached at the last step."""
        warmup = self.warmup_steps if self.warmup_steps > 0 else int(self.warmup_ratio * (self.total_steps or 0))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.kind == "constant" or self.total_steps is None:
            return self.lr
        done = min((step - warmup) / max(self.total_steps - 1 - warmup, 1), 1.0)
        share = 0.5 * (1.0 + math.cos(math.pi * done))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * share)
