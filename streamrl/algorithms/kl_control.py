"""How strongly KL is penalised in the reward, from step to step. No imports; the trainer holds one.

controller = kl_controller("adaptive", kl_coef=0.001, target_kl=0.1, horizon=10_000)
controller.coef                     what the next batch is penalised with
controller.update(kl, rows)         after it: its mean KL, over how many rows
controller.state(), load(state)     for checkpoints
"""

from __future__ import annotations

from typing import Protocol


class KLController(Protocol):
    coef: float

    def update(self, kl: float, rows: int) -> None:
        """`kl`: mean over the batch's rows of the mean KL of their tokens, nats."""
        ...

    def state(self) -> dict[str, float]: ...

    def load(self, state: dict[str, float]) -> None: ...


class FixedKL:
    """The coefficient stays."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, rows: int) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load(self, state: dict[str, float]) -> None:
        """A fixed coefficient comes from the configuration, also after a resume."""


class AdaptiveKL:
    """A proportional controller in the logarithm of the coefficient.

        e = clip(kl / target_kl - 1, -0.2, 0.2);   coef <- coef (1 + e rows / horizon)

    A batch of more than 5 `horizon` rows would turn the factor negative; it is then 0 at the least. A KL that is not
    finite leaves the coefficient as it is.

    Source: Ziegler et al. (arXiv:1909.08593), section 2.2.
    """

    def __init__(self, coef: float, target_kl: float, horizon: int) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(f"adaptive KL control: target_kl={target_kl:g} and horizon={horizon} must be above 0")
        self.coef, self.target_kl, self.horizon = coef, target_kl, horizon

    def update(self, kl: float, rows: int) -> None:
        if kl - kl != 0:  # infinite or not a number
            return
        error = min(max(kl / self.target_kl - 1.0, -0.2), 0.2)
        self.coef *= max(1.0 + error * rows / self.horizon, 0.0)

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])


def kl_controller(kind: str, *, kl_coef: float, target_kl: float, horizon: int) -> KLController:
    """`algorithm.kl_ctrl`: type, kl_coef, target_kl, horizon. Raises ValueError for another type."""
    if kind == "fixed":
        return FixedKL(kl_coef)
    if kind == "adaptive":
        return AdaptiveKL(kl_coef, target_kl, horizon)
    raise ValueError(f"unknown algorithm.kl_ctrl.type {kind!r}; known: fixed, adaptive")
