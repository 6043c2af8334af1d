"""Which tokens lie in which cache row, so that a new request can start from what is already computed."""

from __future__ import annotations

import numpy as np


class PrefixIndex:
    """Tokens whose keys and values are cached, by row: `rows` running ones, then `kept` ones that outlive a request.

    Policy: a row is a source only while the weight version it was begun under is the current one. A running request
    keeps its cache across an update (its tokens carry both versions), but nothing new is built on it: otherwise a
    shared prompt could hand the keys of version 0 on for ever. A later turn after an update computes its prefix again.

    The kept row that is overwritten next is the one unused longest.
    """

    def __init__(self, rows: int, kept: int, max_len: int) -> None:
        self.rows, self.kept = rows, kept
        self._tokens = np.full((rows + kept, max_len), -1, dtype=np.int32)
        self._version = np.full(rows + kept, -1, dtype=np.int64)
        self._used = np.zeros(kept, dtype=np.int64)
        self._clock = 0

    def begin(self, row: int, prompt: list[int], version: int) -> None:
        """`row` now holds exactly this prompt, computed under `version`."""
        self._tokens[row, : len(prompt)] = prompt
        self._tokens[row, len(prompt) :] = -1
        self._version[row] = version

    def extend(self, positions: np.ndarray, tokens: np.ndarray) -> None:
        """One further token in each of the first len(tokens) rows."""
        self._tokens[np.arange(len(tokens)), positions] = tokens

    def find(self, prompt: list[int], version: int) -> tuple[int, int]:
        """(row, length) of the longest usable common prefix, shorter than the prompt; length 0 if there is none."""
        candidates = np.flatnonzero(self._version == version)
        if not len(candidates) or len(prompt) == 1:
            return 0, 0
        wanted = np.asarray(prompt[:-1], dtype=np.int32)  # the last token is always computed: its logits are needed
        differs = self._tokens[candidates, : len(wanted)] != wanted
        lengths = np.where(differs.any(1), differs.argmax(1), len(wanted))
        best = int(lengths.argmax())
        row = int(candidates[best])
        if row >= self.rows:
            self._touch(row)
        return row, int(lengths[best])

    def forget(self, row: int) -> None:
        self._version[row] = -1

    def forget_all(self) -> None:
        self._version[:] = -1

    def move(self, source: int, target: int) -> None:
        self._tokens[target] = self._tokens[source]
        self._version[target] = self._version[source]

    def keep(self, row: int, version: int) -> int | None:
        """The kept row that takes over what `row` holds; None if that is not worth it (old version, none kept)."""
        if not self.kept or self._version[row] != version:
            return None
        target = self.rows + int(self._used.argmin())
        self._touch(target)
        self.move(row, target)
        return target

    def _touch(self, row: int) -> None:
        self._clock += 1
        self._used[row - self.rows] = self._clock
