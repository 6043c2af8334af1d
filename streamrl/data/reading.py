"""Raw rows of dataset files, one after the other, each with the place it came from. Formats: READERS."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from streamrl.config.data_files import HF, NEEDS_PYARROW, HFDataset, directory_files, files_of
from streamrl.errors import DatasetError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands: `number` counts from 1, lines of a jsonl file and rows of the others."""

    file: Path | str
    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


Placed = tuple[Place, dict[str, Any]]


def rows_of(entries: Iterable[str | Path]) -> Iterator[Placed]:
    """The rows of files, directories, patterns and `hf:` datasets (streamrl.config.data_files) in order. Only one file
    is open at a time. Raises DatasetError naming file and line."""
    for entry in map(str, entries):
        if not entry.startswith(HF):
            files = files_of(entry)
        elif saved := HFDataset.parse(entry).saved():
            files = directory_files(saved)
        else:
            yield from _hub(entry)
            continue
        for file in files:
            yield from read_rows(file)


def read_rows(file: Path) -> Iterator[Placed]:
    """The rows of one file in order. Raises DatasetError naming file and line."""
    reader = READERS.get(file.suffix)
    if reader is None:
        raise DatasetError(f"{file} ends in {file.suffix or 'nothing'}; readable are {', '.join(READERS)}")
    try:
        yield from _checked(reader(file))
    except FileNotFoundError as error:
        raise DatasetError(f"there is no dataset file {file}") from error
    except OSError as error:
        raise DatasetError(f"cannot read the dataset file {file}: {error.strerror}") from error


def rows_from(name: str, rows: Iterable[Any]) -> Iterator[Placed]:
    """Rows that something other than a file gives, placed by their number."""
    return _checked((Place(name, "row", number), row) for number, row in enumerate(rows, 1))


def _checked(rows: Iterable[tuple[Place, Any]]) -> Iterator[Placed]:
    for place, row in rows:
        if not isinstance(row, dict):
            raise DatasetError(f"{place}: expected an object with columns, found {found(row)}")
        yield place, row


def _jsonl(file: Path) -> Iterator[tuple[Place, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = Place(file, "line", number)
                yield place, _parsed(line.rstrip(), place)


def _json(file: Path) -> Iterator[tuple[Place, Any]]:
    rows = _parsed(file.read_bytes(), Place(file, "row", 1))
    if not isinstance(rows, list):
        raise DatasetError(f"{file}: expected a JSON array of rows, found {found(rows)}; one row per line is .jsonl")
    for number, row in enumerate(rows, 1):
        yield Place(file, "row", number), row


def _parsed(text: bytes, place: Place) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{place.file}, line {error.lineno}" if place.unit == "row" else place
        raise DatasetError(f"{where}: not valid JSON at character {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, an integer of thousands of digits, nested too deeply
        where = place.file if place.unit == "row" else place
        raise DatasetError(f"{where}: not valid JSON: {error}") from error


def _parquet(file: Path) -> Iterator[tuple[Place, Any]]:
    parquet = _pyarrow(file, "pyarrow.parquet")
    with file.open("rb") as source:
        yield from _batches(file, lambda: parquet.ParquetFile(source).iter_batches())


def _arrow(file: Path) -> Iterator[tuple[Place, Any]]:
    """An IPC file begins with a magic; a stream (what `datasets` saves) does not."""
    ipc = _pyarrow(file, "pyarrow.ipc")

    def batches() -> Iterable[Any]:
        if source.read(6) != b"ARROW1":
            source.seek(0)
            return ipc.open_stream(source)
        reader = ipc.open_file(source)
        return (reader.get_batch(index) for index in range(reader.num_record_batches))

    with file.open("rb") as source:
        yield from _batches(file, batches)


def _batches(file: Path, batches: Callable[[], Iterable[Any]]) -> Iterator[tuple[Place, Any]]:
    from pyarrow import ArrowException

    number = 0
    try:
        for batch in batches():
            for start in range(0, len(batch), 1024):  # as Python values a batch takes ten times its bytes
                part = batch.slice(start, 1024)
                for row in _python(part, file, number):
                    number += 1
                    yield Place(file, "row", number), row
    except UnicodeDecodeError as error:
        raise DatasetError(f"{file}: a column's name is not UTF-8: {error}; rename the column") from error
    except ArrowException as error:
        raise DatasetError(f"{file}: not a readable {file.suffix[1:]} file (after row {number}): {error}") from error


def _python(batch: Any, file: Path, before: int) -> list[dict[str, Any]]:
    """The rows of a batch that follow `before` others. Raises DatasetError naming row and column of bad text."""
    names = batch.schema.names
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(len(batch)):
            for name, column in zip(names, batch.columns, strict=True):
                try:
                    column[number].as_py()
                except UnicodeDecodeError as error:
                    place = Place(file, "row", before + number + 1)
                    raise DatasetError(f"{place}, column {name!r}: not UTF-8: {error}; write it again") from error
        raise


def _pyarrow(file: Path, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise DatasetError(f"reading {file} {NEEDS_PYARROW}") from error


def _hub(entry: str) -> Iterator[Placed]:
    """By the `datasets` library, which keeps a memory-mapped copy in its cache. HF_HUB_OFFLINE is its to honour."""
    wanted = HFDataset.parse(entry)
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise DatasetError(f"{entry} needs the datasets library; pip install 'streamrl[datasets]'") from error
    try:
        loaded = datasets.load_dataset(wanted.name, wanted.config, split=wanted.split)
    except Exception as error:
        raise DatasetError(f"{entry} cannot be loaded: {type(error).__name__}: {error}") from error
    tables = loaded.with_format("arrow").iter(1024)  # as stored: images and audio stay bytes
    yield from rows_from(entry, (row for table in tables for row in table.to_pylist()))


READERS: dict[str, Callable[[Path], Iterator[tuple[Place, Any]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".arrow": _arrow,
}


def found(value: Any) -> str:
    """A value for an error message: its type and its beginning."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
