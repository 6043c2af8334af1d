"""All prompt rows of a run in memory, by their place in the endless sequence epoch 0, epoch 1, ..."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.data.order import permutation
from streamrl.data.reading import read_rows
from streamrl.data.rows import prompt_row
from streamrl.errors import DatasetError


class PromptDataset:
    """Rows by index, and their order by (seed, epoch): the same after every restart, so that a number is all that a
    checkpoint needs to keep.

    >>> dataset = PromptDataset(rows, seed=42)
    >>> dataset.at(epoch=0, position=0)["raw_prompt"]
    """

    def __init__(self, rows: Sequence[dict[str, Any]], *, seed: int = 0, shuffle: bool = True) -> None:
        """Raises ValueError if there are no rows."""
        if not rows:
            raise ValueError("a dataset needs at least one row")
        self._rows = list(rows)
        self.seed = seed
        self.shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._make_order)  # the feeder crosses at most one epoch boundary at a time

    @classmethod
    def from_files(
        cls,
        files: Sequence[str | Path],
        *,
        seed: int = 0,
        shuffle: bool = True,
        max_samples: int = -1,
        prompt_key: str = "prompt",
        source_key: str = "data_source",
    ) -> PromptDataset:
        """Rows of all files, one after the other. With `max_samples` >= 0 a part of them, drawn by the seed if
        `shuffle`, else the first. Raises DatasetError naming file, line and column."""
        rows = [
            prompt_row(row, place, prompt_key=prompt_key, source_key=source_key)
            for file in files
            for place, row in read_rows(Path(file))
        ]
        if 0 <= max_samples < len(rows):
            chosen = permutation(len(rows), seed, -1) if shuffle else np.arange(len(rows))
            rows = [rows[index] for index in np.sort(chosen[:max_samples])]
        if not rows:
            raise DatasetError(f"no rows in {', '.join(map(str, files)) or 'no files'} (max_samples={max_samples})")
        return cls(rows, seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """The prompt columns of a row (streamrl.data.rows) and its "index"."""
        return {**self._rows[index], "index": index}

    def order(self, epoch: int) -> np.ndarray:
        """i64[len]: the row index at each position of the epoch."""
        return self._order(epoch)

    def at(self, epoch: int, position: int) -> dict[str, Any]:
        """The row at a position of an epoch."""
        return self.row(int(self.order(epoch)[position]))

    def _make_order(self, epoch: int) -> np.ndarray:
        return permutation(len(self), self.seed, epoch) if self.shuffle else np.arange(len(self))
