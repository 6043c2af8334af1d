"""All prompt rows of a run by their place in the endless sequence epoch 0, epoch 1, ..."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from streamrl.data.columns import DEFAULT, Columns
from streamrl.data.formats import Place
from streamrl.data.lengths import PromptLimit
from streamrl.data.order import permutation
from streamrl.data.packed import PackedRows
from streamrl.data.rows import prompt_row
from streamrl.data.sources import Placed, Source, sources_of, taken
from streamrl.errors import DatasetError

log = logging.getLogger(__name__)

TOLD_EVERY = 5.0
"""Seconds of reading."""
Tell = Callable[[str], None]
"""Takes a line about how far reading is."""


class PromptDataset:
    """Rows by index, and their order by (seed, epoch): the same after every restart, so that a number is all that a
    checkpoint needs to keep.

    >>> dataset = PromptDataset(rows, seed=42)
    >>> dataset.at(epoch=0, position=0)["raw_prompt"]
    """

    def __init__(
        self, rows: Sequence[dict[str, Any]], *, seed: int = 0, shuffle: bool = True, left_out: int = 0
    ) -> None:
        """Raises ValueError if there are no rows."""
        if not rows:
            raise ValueError("a dataset needs at least one row")
        self._rows = rows
        self.seed = seed
        self.shuffle = shuffle
        self.left_out = left_out
        """Rows that were read and had too long a prompt."""
        self._order = lru_cache(maxsize=2)(self._make_order)  # the feeder crosses at most one epoch boundary at a time

    @classmethod
    def from_files(cls, files: Sequence[str | Path], **options: Any) -> PromptDataset:
        """`from_sources` over all files, one after the other (streamrl.config.data_files says what a file may be)."""
        return cls.from_sources(list(sources_of(files)), ", ".join(map(str, files)) or "no files", **options)

    @classmethod
    def from_sources(
        cls,
        sources: Sequence[Source],
        name: str,
        *,
        seed: int = 0,
        shuffle: bool = True,
        max_samples: int = -1,
        columns: Columns = DEFAULT,
        limit: PromptLimit | None = None,
        check: Callable[[dict[str, Any], Place], None] | None = None,
        tell: Tell = log.info,
    ) -> PromptDataset:
        """Rows as some framework wrote them, checked, by `check` too, in one pass that holds a few of them at a time.
        With `max_samples` >= 0 a part of them, drawn by the seed if `shuffle`, else the first; `limit` then says what
        happens to long prompts. Every few seconds `tell` gets a line. Raises DatasetError naming file, line and column;
        `name` is the word for all rows."""
        rows = PackedRows()
        begun = told = monotonic()

        def packed() -> Iterator[Placed]:
            nonlocal told
            for place, row in taken(sources, max_samples, seed if shuffle else None):
                prompt = prompt_row(row, place, columns)
                if check is not None:
                    check(prompt, place)
                rows.append(prompt, place)
                if (now := monotonic()) >= told + TOLD_EVERY:
                    told = now
                    tell(f"reading {name}: {len(rows):,} rows in {now - begun:.0f} s")
                yield place, prompt

        left_out = 0
        if limit is not None:
            left_out = limit.apply(packed(), rows)
        else:
            deque(packed(), maxlen=0)  # the rows are what it leaves behind
        if not rows and limit is not None and left_out:
            raise DatasetError(
                f"every prompt in {name} is longer than data.max_prompt_length={limit.max_tokens} tokens; raise it"
            )
        if not rows:
            raise DatasetError(f"no rows in {name} (max_samples={max_samples})")
        return cls(rows, seed=seed, shuffle=shuffle, left_out=left_out)

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
