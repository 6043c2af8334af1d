"""Weights as they were, kept beside those that go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from streamrl.workers.engine.gather import local


class Snapshot:
    """A copy of what lies on this rank of some parameters, in CPU memory; the parameters have to be resharded."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._kept = [local(parameter).cpu().clone() for parameter in parameters]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The parameters hold the copy inside, and what they held before again after it."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for kept, parameter in zip(self._kept, self._parameters, strict=True):
            held = local(parameter).cpu().clone()
            local(parameter).copy_(kept)
            kept.copy_(held)
