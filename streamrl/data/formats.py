"""The file formats of datasets: how many rows a file has, and a stream of them, without holding the file.

            counted by                 read by                        held while reading
jsonl       its lines, unparsed        line                           a line
json        reading it                 the whole array                the file
parquet     its metadata               some rows of a row group       pages of a row group
arrow       its batches, mapped        some rows of a batch           the pages that are touched

`chosen` are the numbers of the rows that are wanted, from 0 and ascending (None: all). What holds none of them (a row
group, a batch) is not decoded, a line that is none of them not parsed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from streamrl.config.data_files import NEEDS_PYARROW
from streamrl.errors import DatasetError

T = TypeVar("T")
Chosen = np.ndarray | None
"""i64[rows], ascending."""
BATCH, BATCH_BYTES = 1024, 1 << 20
"""Rows and bytes of them that become Python values together, which take up to ten times as many."""
BUFFER = 1 << 20
"""Bytes of a column that are read at a time: a row group may be the whole file."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands: `number` counts from 1, lines of a jsonl file and rows of the others."""

    file: Path | str
    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


@dataclass(frozen=True, slots=True)
class Format:
    count: Callable[[Path], int]
    read: Callable[[Path, Chosen], Iterator[tuple[Place, Any]]]


def picked(items: Iterable[T], chosen: Chosen) -> Iterator[tuple[int, T]]:
    """Those items, with their numbers from 0."""
    if chosen is None:
        yield from enumerate(items)
        return
    wanted = iter(chosen.tolist())
    number = next(wanted, None)
    for index, item in enumerate(items):
        if number is None:
            return
        if index == number:
            yield index, item
            number = next(wanted, None)


def _jsonl_count(file: Path) -> int:
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _jsonl(file: Path, chosen: Chosen) -> Iterator[tuple[Place, Any]]:
    with file.open("rb") as lines:
        filled = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        for _, (number, line) in picked(filled, chosen):
            place = Place(file, "line", number)
            yield place, _parsed(line.rstrip(), place)


def _json_rows(file: Path) -> list[Any]:
    rows = _parsed(file.read_bytes(), Place(file, "row", 1))
    if not isinstance(rows, list):
        raise DatasetError(f"{file}: expected a JSON array of rows, found {found(rows)}; one row per line is .jsonl")
    return rows


def _json(file: Path, chosen: Chosen) -> Iterator[tuple[Place, Any]]:
    for index, row in picked(_json_rows(file), chosen):
        yield Place(file, "row", index + 1), row


def _parsed(text: bytes, place: Place) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{place.file}, line {error.lineno}" if place.unit == "row" else place
        raise DatasetError(f"{where}: not valid JSON at character {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, an integer of thousands of digits, nested too deeply
        where = place.file if place.unit == "row" else place
        raise DatasetError(f"{where}: not valid JSON: {error}") from error


def _parquet_count(file: Path) -> int:
    with _parquet_file(file) as parquet:
        return parquet.metadata.num_rows


def _parquet(file: Path, chosen: Chosen) -> Iterator[tuple[Place, Any]]:
    with _parquet_file(file) as parquet:
        yield from _rows(file, _row_groups(parquet, chosen), chosen)


def _row_groups(parquet: Any, chosen: Chosen) -> Iterator[tuple[int, Any]]:
    first = 0
    for group in range(parquet.num_row_groups):
        about = parquet.metadata.row_group(group)
        rows, start = about.num_rows, first
        if len(_within(chosen, first, rows)):
            size = _batch_size(rows, about.total_byte_size)
            for batch in parquet.iter_batches(batch_size=size, row_groups=[group]):
                yield start, batch
                start += len(batch)
        first += rows


@contextmanager
def _parquet_file(file: Path) -> Iterator[Any]:
    module = _pyarrow(file, "pyarrow.parquet")
    with file.open("rb") as source, _table_errors(file):
        yield module.ParquetFile(source, buffer_size=BUFFER, pre_buffer=False)


def _arrow_count(file: Path) -> int:
    with _arrow_batches(file) as batches:
        rows = 0
        for batch in batches:
            batch.validate()  # else a damaged number of rows is believed
            rows += batch.num_rows
        return rows


def _arrow(file: Path, chosen: Chosen) -> Iterator[tuple[Place, Any]]:
    def numbered() -> Iterator[tuple[int, Any]]:
        first = 0
        for batch in batches:
            if len(_within(chosen, first, batch.num_rows)):
                _validate(batch)
                yield first, batch
            first += batch.num_rows

    with _arrow_batches(file) as batches:
        yield from _rows(file, numbered(), chosen)


@contextmanager
def _arrow_batches(file: Path) -> Iterator[Iterable[Any]]:
    """An IPC file begins with a magic; a stream (what `datasets` saves) does not."""
    ipc, pyarrow = _pyarrow(file, "pyarrow.ipc"), _pyarrow(file, "pyarrow")
    with file.open("rb") as head:  # its errors say what is wrong
        is_file = head.read(6) == b"ARROW1"
    with pyarrow.memory_map(str(file)) as source, _table_errors(file):
        reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
        yield (reader.get_batch(index) for index in range(reader.num_record_batches)) if is_file else reader


def _validate(batch: Any) -> None:
    """Raises ArrowInvalid for offsets and lengths that point outside the mapped file: reading there ends the process.

    Text that is not UTF-8 passes in a column of strings: `_python` names its row.
    """
    from pyarrow import ArrowInvalid, binary, large_binary, large_string, string

    bytes_of = {string(): binary(), large_string(): large_binary()}
    batch.validate()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            (column.view(bytes_of[column.type]) if column.type in bytes_of else column).validate(full=True)
        except ArrowInvalid as error:
            raise ArrowInvalid(f"column {name!r}: {error}") from error


@contextmanager
def _table_errors(file: Path) -> Iterator[None]:
    from pyarrow import ArrowException

    try:
        yield
    except UnicodeDecodeError as error:
        raise DatasetError(f"{file}: a column's name is not UTF-8: {error}; rename the column") from error
    except (ArrowException, OSError, SystemError) as error:  # IPC errors are OSErrors
        raise DatasetError(f"{file}: not a readable {file.suffix[1:]} file: {error}") from error


def _rows(file: Path, batches: Iterable[tuple[int, Any]], chosen: Chosen) -> Iterator[tuple[Place, Any]]:
    """`batches` come with the number of their first row."""
    for first, batch in batches:
        size = _batch_size(len(batch), batch.nbytes)
        for start in range(0, len(batch), size):
            part = batch.slice(start, size)
            numbers = _within(chosen, first + start, len(part))
            if len(numbers):
                places = [Place(file, "row", number + 1) for number in numbers]
                some = part if len(numbers) == len(part) else part.take(numbers - first - start)
                yield from zip(places, _python(some, places), strict=True)


def _batch_size(rows: int, size: int) -> int:
    """Rows of a table of `rows` rows and `size` bytes."""
    return max(1, min(BATCH, BATCH_BYTES * rows // max(size, 1)))


def _within(chosen: Chosen, first: int, rows: int) -> np.ndarray:
    """Of the chosen numbers those of `rows` rows from `first`."""
    if chosen is None:
        return np.arange(first, first + rows)
    return chosen[np.searchsorted(chosen, first) : np.searchsorted(chosen, first + rows)]


def _python(batch: Any, places: list[Place]) -> list[dict[str, Any]]:
    """The rows of a batch. Raises DatasetError naming row and column of bad text."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        for number, place in enumerate(places):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column[number].as_py()
                except UnicodeDecodeError as error:
                    raise DatasetError(f"{place}, column {name!r}: not UTF-8: {error}; write it again") from error
        raise


def _pyarrow(file: Path, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise DatasetError(f"reading {file} {NEEDS_PYARROW}") from error


FORMATS: dict[str, Format] = {
    ".jsonl": Format(_jsonl_count, _jsonl),
    ".json": Format(lambda file: len(_json_rows(file)), _json),
    ".parquet": Format(_parquet_count, _parquet),
    ".arrow": Format(_arrow_count, _arrow),
}


def found(value: Any) -> str:
    """A value for an error message: its type and its beginning."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
