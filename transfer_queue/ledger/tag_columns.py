"""Numbers out of the tags of all rows, for samplers that look at all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

MAX_COLUMNS = 8
"""Tags that are kept as columns, those asked for last."""


class TagColumns:
    """One entry of the tags as a column by row id, decoded when it is first asked for, 9 bytes a row.

    Invariant: `known` of a column is set for a row only as long as its tag has not been replaced; whoever replaces tags
    says so by `forget`.
    """

    def __init__(self) -> None:
        self._columns: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # values, known

    def forget(self, rows: Sequence[int]) -> None:
        """These rows have other tags."""
        if not self._columns:
            return
        at = np.asarray(rows, np.int64)
        for _, known in self._columns.values():
            known[at[at < len(known)]] = False

    def numbers(self, name: str, tags: Sequence[bytes], rows: np.ndarray) -> np.ndarray:
        """float64 per row; nan where the tag lacks the entry. `tags` are those of all rows, by id.

        Raises ValueError or TypeError for an entry that is no number.
        """
        values, known = self._column(name, len(tags))
        new = rows[~known[rows]]
        if len(new):
            one = entry_of(name)
            found = [one(tags[row]).value for row in new.tolist()]
            values[new] = np.asarray([np.nan if value is None else value for value in found], np.float64)
            known[new] = True
        return values[rows]

    def _column(self, name: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
        values, known = self._columns.pop(name, (np.empty(0), np.zeros(0, bool)))
        if len(known) < rows:
            more = max(rows - len(known), len(known) // 4)
            values, known = np.append(values, np.empty(more)), np.append(known, np.zeros(more, bool))
        self._columns[name] = values, known
        if len(self._columns) > MAX_COLUMNS:
            del self._columns[next(iter(self._columns))]
        return values, known


@functools.lru_cache(maxsize=64)
def entry_of(name: str) -> Callable[[bytes], Any]:
    """Takes one entry out of a packed tag, as `value`, None if it is missing: several times as quick as decoding it
    all."""
    kind = msgspec.defstruct("OneTag", [("value", Any, None)], rename={"value": name})
    return msgspec.msgpack.Decoder(kind).decode
