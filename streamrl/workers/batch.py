"""A rank's rows in memory: ragged numpy, padded nowhere. Pure functions on them. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from streamrl.single_controller.balance import balanced_partitions, row_cost


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatching:
    """How the rows of a rank are cut into micro-batches: by tokens, by rows, or both; neither: all rows are one."""

    max_tokens: int | None = None
    """Of a micro-batch on a rank, padding counted. A longer row is alone."""
    max_rows: int | None = None

    def __post_init__(self) -> None:
        for name, limit in (("max_tokens", self.max_tokens), ("max_rows", self.max_rows)):
            if limit is not None and limit < 1:
                raise ValueError(f"MicroBatching: {name}={limit}; at least 1, or None for no limit")

    def cut(self, lengths: Sequence[int], *, packed: bool) -> list[list[int]]:
        """Indices of rows in as few micro-batches as the longest-first order gives.

        Rows of like length go together. `packed` rows count their tokens, else each counts as the longest.
        """
        batches: list[list[int]] = []
        longest = tokens = 0
        for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            size = tokens + lengths[index] if packed else (len(batches[-1]) + 1) * longest if batches else 0
            if not batches or self._over(size, len(batches[-1]) + 1):
                batches.append([])
                longest, tokens = lengths[index], 0
            tokens += lengths[index]
            batches[-1].append(index)
        return batches

    def spread(self, lengths: Sequence[int], count: int, *, packed: bool) -> list[list[int]]:
        """Exactly `count` micro-batches, some of which may be empty: ranks run in step, so all run as many as the one
        that needs most. Packed rows are balanced by what they cost; padded ones of like length stay together."""
        batches = self.cut(lengths, packed=packed)
        if len(batches) > count:
            raise ValueError(f"{len(lengths)} rows need {len(batches)} micro-batches of {self}, more than {count}")
        if packed and count > 1:
            even = balanced_partitions([row_cost(length) for length in lengths], count)
            if not any(self._over(sum(lengths[i] for i in part), len(part)) for part in even if len(part) > 1):
                batches = [sorted(part, key=lambda i: (-lengths[i], i)) for part in even]
        return batches + [[] for _ in range(count - len(batches))]

    def _over(self, tokens: int, rows: int) -> bool:
        return (self.max_tokens is not None and tokens > self.max_tokens) or (
            self.max_rows is not None and rows > self.max_rows
        )


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


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch of B rows one after the other, N tokens, attention staying within each; as `Padded` otherwise."""

    input_ids: np.ndarray
    """i64[1, N]."""
    position_ids: np.ndarray
    """i64[1, N]: from 0 in each row."""
    lengths: tuple[int, ...]
    """Of the rows, and of a filler row if N had to be a multiple of the ranks that share it."""
    positions: np.ndarray
    targets: np.ndarray
    row: np.ndarray


def pad(rows: Rows) -> Padded:
    """Raises ValueError for a row without a prompt or without a response."""
    _check(rows)
    width = max(rows.lengths)
    input_ids = np.zeros((len(rows), width), np.int64)
    for i, ids in enumerate(rows.input_ids):
        input_ids[i, : len(ids)] = ids
    row, at = _response_places(rows)
    return Padded(input_ids, row * width + at - 1, input_ids[row, at], row)


def pack(rows: Rows, multiple: int = 1) -> Packed:
    """N is made a multiple of `multiple`. Raises ValueError as `pad`."""
    _check(rows)
    lengths = rows.lengths
    filler = -sum(lengths) % multiple
    flat = np.concatenate([*rows.input_ids, np.zeros(filler, np.int64)]).astype(np.int64, copy=False)
    with_filler = (*lengths, filler) if filler else tuple(lengths)
    row, at = _response_places(rows)
    places = np.concatenate([[0], np.cumsum(lengths)])[row] + at
    position_ids = np.concatenate([np.arange(length) for length in with_filler])
    return Packed(flat[None], position_ids[None], with_filler, places - 1, flat[places], row)


def at_places(laid: Padded | Packed, lengths: Sequence[int], places: np.ndarray) -> Padded | Packed:
    """The same micro-batch, looked at in one place of each row, i64[B] from its begin, instead of at the responses."""
    count = len(lengths)
    begins = (
        np.arange(count) * laid.input_ids.shape[1] if isinstance(laid, Padded) else np.cumsum([0, *lengths])[:count]
    )
    return replace(laid, positions=begins + places, targets=np.zeros(count, np.int64), row=np.arange(count))


def _check(rows: Rows) -> None:
    for ids, response in zip(rows.input_ids, rows.responses, strict=True):
        if not 0 < response < len(ids):
            raise ValueError(
                f"a row of {len(ids)} tokens with {response} response tokens: both parts need one at least"
            )


def _response_places(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """i64[T] each: the row of each response token, and its place in the row."""
    spans = [np.arange(len(ids) - r, len(ids)) for ids, r in zip(rows.input_ids, rows.responses, strict=True)]
    return np.repeat(np.arange(len(rows)), rows.responses), np.concatenate(spans)


def unflatten(values: np.ndarray, responses: Sequence[int]) -> list[np.ndarray]:
    """[T] cut into one array per row."""
    return np.split(values, np.cumsum(responses)[:-1]) if responses else []
