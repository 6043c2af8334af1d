"""Where the rows of a partition lie, one column of places, and small things done with such arrays."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class Places:
    """One place per row: a put, the row in it, and which fields the row has from there.

    Arrays by row id, int32: `fields` (a number of FieldSets; NOTHING: no place), `put` and `index` (else meaningless).
    """

    __slots__ = ("fields", "index", "put")

    def __init__(self, capacity: int) -> None:
        self.fields, self.put, self.index = (np.zeros(capacity, np.int32) for _ in range(3))

    def resize(self, capacity: int) -> None:
        for values in (self.fields, self.put, self.index):
            values.resize(capacity, refcheck=False)  # nobody keeps views; realloc moves large arrays without a copy


def set_places(places: Places, at: np.ndarray, fields: int, put: int, index: np.ndarray) -> None:
    places.fields[at], places.put[at], places.index[at] = fields, put, index


def same(values: np.ndarray) -> bool:
    return bool((values == values[:1]).all())


def counts(values: np.ndarray) -> Iterable[tuple[int, int]]:
    """The distinct values and how often each is there."""
    if same(values):
        return ((int(values[0]), len(values)),)
    found, counts = np.unique(values, return_counts=True)
    return zip(found.tolist(), counts.tolist(), strict=True)
