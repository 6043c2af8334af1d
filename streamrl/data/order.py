"""The order of a dataset in an epoch: a permutation that depends on (seed, epoch, size) and on nothing else.

NumPy does not promise that its own shuffles stay the same from release to release, and a resumed run must continue
the very sequence it left; so the permutation sorts the rows by a hash.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """i64[size]: the row at each position of the epoch."""
    start = _mixed_int((_mixed_int(seed) + epoch * _GOLDEN) & _MASK)
    counters = np.uint64(start) + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return np.argsort(_mixed(counters), kind="stable")


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea, Flood 2014), elementwise on u64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mixed_int(x: int) -> int:
    return int(_mixed(np.array([(x + _GOLDEN) & _MASK], dtype=np.uint64))[0])
