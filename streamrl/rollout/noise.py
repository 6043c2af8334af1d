"""Random numbers that are a pure function of (seed, stream, position), for the real and the simulated engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

_WORD = (1 << 64) - 1


class _Key(ISeedSequence):
    """A key as numpy takes it without asking the operating system for entropy first, which costs more than the draw."""

    def __init__(self, *words: int) -> None:
        self._words = np.array(words, dtype=np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        return self._words


def uniforms(seed: int, stream: int, start: int, count: int) -> list[float]:
    """`uniform_array` as Python numbers."""
    return uniform_array(seed, stream, start, count).tolist()


def uniform_array(seed: int, stream: int, start: int, count: int) -> np.ndarray:
    """`count` numbers in [0, 1), exact in float32, for the positions `start`... of the stream (seed, stream).

    The raw words of a counter-based generator are the same in every numpy version; the distributions built on them are
    not, so the scaling is done here.
    """
    key: Any = _Key(seed & _WORD, stream & _WORD)  # as documented; numpy's annotation knows its own SeedSequence alone
    words = np.random.Philox(key).random_raw(start + count)[start:]
    return (words >> np.uint64(40)) * 2.0**-24


class Streams:
    """Which (seed, stream) a request draws from: its own seed, or the next stream of the server's."""

    def __init__(self, seed: int) -> None:
        self._seed, self._taken = seed, 0

    def of(self, seed: int | None) -> tuple[int, int]:
        if seed is not None:
            return seed, 0
        self._taken += 1
        return self._seed, self._taken
