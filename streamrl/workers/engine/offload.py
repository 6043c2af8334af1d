"""Optimizer states in CPU memory between steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class OptimizerOffload:
    """`on`: between `loaded()` blocks every tensor of the optimizer's state lies on the CPU."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, *, on: bool) -> None:
        self._optimizer = optimizer if on else None

    @contextmanager
    def loaded(self) -> Iterator[None]:
        if self._optimizer is None:
            yield
            return
        for parameter, state in self._optimizer.state.items():
            _move(state, parameter.device)
        try:
            yield
        finally:
            for state in self._optimizer.state.values():
                _move(state, torch.device("cpu"))


def _move(state: dict[str, torch.Tensor], device: torch.device) -> None:
    for name, value in state.items():
        state[name] = value.to(device)
