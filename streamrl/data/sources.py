"""Where rows come from: files, datasets of the hub, what a user's function gives. Each can be counted and streamed.

read()          every row, in order
count()         how many there are, without parsing them where that is possible
read(chosen)    some of them, by their numbers
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from streamrl.config.data_files import HF, HFDataset, directory_files, files_of
from streamrl.data.formats import BATCH, FORMATS, Chosen, Place, found, picked
from streamrl.data.order import permutation
from streamrl.data.packed import PackedRows
from streamrl.errors import DatasetError

Placed = tuple[Place, dict[str, Any]]


class Source(Protocol):
    def count(self) -> int: ...

    def read(self, chosen: Chosen = None) -> Iterator[Placed]:
        """Raises DatasetError naming the place; one that is not chosen need not be looked at."""
        ...


def sources_of(entries: Iterable[str | Path]) -> Iterator[Source]:
    """Files, directories, patterns and `hf:` datasets (streamrl.config.data_files) in order."""
    for entry in map(str, entries):
        if not entry.startswith(HF):
            yield from map(File, files_of(entry))
        elif saved := HFDataset.parse(entry).saved():
            yield from map(File, directory_files(saved))
        else:
            yield Hub(entry)


def rows_of(entries: Iterable[str | Path]) -> Iterator[Placed]:
    """All their rows. Only one file is open at a time. Raises DatasetError naming file and line."""
    return chain.from_iterable(source.read() for source in sources_of(entries))


def taken(sources: Sequence[Source], max_samples: int, seed: int | None) -> Iterator[Placed]:
    """All rows, or `max_samples` of them (if >= 0): drawn by the seed, in their order, or the first (None)."""
    if max_samples < 0:
        return chain.from_iterable(source.read() for source in sources)
    if seed is None:
        return islice(chain.from_iterable(source.read() for source in sources), max_samples)
    counts = [source.count() for source in sources]
    drawn = np.sort(permutation(sum(counts), seed, -1)[:max_samples])
    bounds = np.cumsum([0, *counts])
    parts = (drawn[slice(*np.searchsorted(drawn, (low, high)))] - low for low, high in pairwise(bounds))
    return chain.from_iterable(source.read(part) for source, part in zip(sources, parts, strict=True) if len(part))


@dataclass(frozen=True, slots=True)
class File:
    path: Path

    def count(self) -> int:
        with self._readable():
            return FORMATS[self.path.suffix].count(self.path)

    def read(self, chosen: Chosen = None) -> Iterator[Placed]:
        with self._readable():
            yield from _checked(FORMATS[self.path.suffix].read(self.path, chosen))

    @contextmanager
    def _readable(self) -> Iterator[None]:
        file = self.path
        if file.suffix not in FORMATS:
            raise DatasetError(f"{file} ends in {file.suffix or 'nothing'}; readable are {', '.join(FORMATS)}")
        try:
            yield
        except FileNotFoundError as error:
            raise DatasetError(f"there is no dataset file {file}") from error
        except OSError as error:
            raise DatasetError(f"cannot read the dataset file {file}: {error.strerror or error}") from error


@dataclass(slots=True)
class Hub:
    """Read by the `datasets` library, which keeps a mapped copy in its cache. HF_HUB_OFFLINE is its to honour."""

    entry: str
    _loaded: Any = None

    def count(self) -> int:
        return len(self._load())

    def read(self, chosen: Chosen = None) -> Iterator[Placed]:
        loaded = self._load() if chosen is None else self._load().select(chosen)
        tables = loaded.with_format("arrow").iter(BATCH)  # as stored: images and audio stay bytes
        numbers = None if chosen is None else iter(chosen.tolist())
        rows = (row for table in tables for row in table.to_pylist())
        return _placed(self.entry, ((n if numbers is None else next(numbers), row) for n, row in enumerate(rows)))

    def _load(self) -> Any:
        if self._loaded is None:
            wanted = HFDataset.parse(self.entry)
            try:
                datasets = import_module("datasets")
            except ImportError as error:
                raise DatasetError(
                    f"{self.entry} needs the datasets library; pip install 'streamrl[datasets]'"
                ) from error
            try:
                self._loaded = datasets.load_dataset(wanted.name, wanted.config, split=wanted.split)
            except Exception as error:
                raise DatasetError(f"{self.entry} cannot be loaded: {type(error).__name__}: {error}") from error
        return self._loaded


@dataclass(slots=True)
class Indexed:
    """What has a length and gives its rows by number; a map-style dataset need not end with IndexError."""

    name: str
    rows: Any

    def count(self) -> int:
        return len(self.rows)

    def read(self, chosen: Chosen = None) -> Iterator[Placed]:
        numbers = range(len(self.rows)) if chosen is None else chosen.tolist()
        return _placed(self.name, ((number, self.rows[number]) for number in numbers))


@dataclass(slots=True)
class Once:
    """What gives its rows one time only: counting them means to keep them."""

    name: str
    rows: Iterable[Any]
    _kept: PackedRows | None = field(default=None, init=False)

    def count(self) -> int:
        if self._kept is None:
            kept = PackedRows()
            for place, row in _placed(self.name, enumerate(self.rows)):
                kept.append(row, place)
            self._kept = kept
        return len(self._kept)

    def read(self, chosen: Chosen = None) -> Iterator[Placed]:
        return _placed(self.name, picked(self.rows if self._kept is None else self._kept, chosen))


def _placed(name: str, rows: Iterable[tuple[int, Any]]) -> Iterator[Placed]:
    return _checked((Place(name, "row", number + 1), row) for number, row in rows)


def _checked(rows: Iterable[tuple[Place, Any]]) -> Iterator[Placed]:
    for place, row in rows:
        if not isinstance(row, dict):
            raise DatasetError(f"{place}: expected an object with columns, found {found(row)}")
        yield place, row
