"""A rank's rows in memory: ragged numpy, padded nowhere. Pure functions on them. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Rows:
    """B rows. `input_ids[i]` is i64[P+R], `responses[i]` is R; the arrays of `columns` belong to the R response tokens.

    Text positions are 0..P+R-1, so no column of them is read.
    """

    input_ids: list[np.ndarray]
    responses: list[int]
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.input_ids]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def take(self, indices: Sequence[int]) -> Rows:
        return Rows(
            [self.input_ids[i] for i in indices],
            [self.responses[i] for i in indices],
            {name: [column[i] for i in indices] for name, column in self.columns.items()},
        )

    def flat(self, name: str) -> np.ndarray:
        """A column of all rows, one after the other: [T]."""
        return np.concatenate(self.columns[name]) if len(self) else np.zeros(0, np.float32)


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of rows in micro-batches of at most `max_tokens` padded tokens (rows x longest).

    Rows of like length go together, so that little is padded. A row longer than `max_tokens` is alone.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or (len(batches[-1]) + 1) * longest > max_tokens:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches


@dataclass(frozen=True, slots=True)
class Padded:
    """A micro-batch of B rows as a model takes it. T response tokens in all, row after row.

    Padding is on the right: under causal attention no real token sees it, so there is no attention mask.
    """

    input_ids: np.ndarray
    """i64[B, L], padded with 0."""
    positions: np.ndarray
    """i64[T]: where in the flattened [B * L] the model predicts each response token (one before the token)."""
    targets: np.ndarray
    """i64[T]: the response tokens."""
    row: np.ndarray
    """i64[T]: the row of each."""


def pad(rows: Rows) -> Padded:
    """Raises ValueError for a row without a prompt or without a response."""
    for ids, response in zip(rows.input_ids, rows.responses, strict=True):
        if not 0 < response < len(ids):
            raise ValueError(
                f"a row of {len(ids)} tokens with {response} response tokens: both parts need one at least"
            )
    width = max(rows.lengths)
    input_ids = np.zeros((len(rows), width), np.int64)
    for i, ids in enumerate(rows.input_ids):
        input_ids[i, : len(ids)] = ids
    spans = [np.arange(len(ids) - r, len(ids)) for ids, r in zip(rows.input_ids, rows.responses, strict=True)]
    row = np.repeat(np.arange(len(rows)), rows.responses)
    at = np.concatenate(spans)
    return Padded(input_ids, row * width + at - 1, input_ids[row, at], row)


def unflatten(values: np.ndarray, responses: Sequence[int]) -> list[np.ndarray]:
    """[T] cut into one array per row."""
    return np.split(values, np.cumsum(responses)[:-1]) if responses else []
