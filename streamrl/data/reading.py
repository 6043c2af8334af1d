"""Raw rows of jsonl, json and parquet files, each with the place it came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import DatasetError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands: `number` counts from 1, lines of a jsonl file and rows of the others."""

    file: Path
    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


def read_rows(file: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The rows of one file in order. Raises DatasetError naming file and line."""
    reader = READERS.get(file.suffix)
    if reader is None:
        raise DatasetError(f"{file} ends in {file.suffix or 'nothing'}; readable are {', '.join(READERS)}")
    try:
        for place, row in reader(file):
            if not isinstance(row, dict):
                raise DatasetError(f"{place}: expected an object with columns, found {found(row)}")
            yield place, row
    except FileNotFoundError as error:
        raise DatasetError(f"there is no dataset file {file}") from error
    except OSError as error:
        raise DatasetError(f"cannot read the dataset file {file}: {error.strerror}") from error


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
    except (UnicodeDecodeError, RecursionError) as error:
        raise DatasetError(f"{place}: not valid JSON: {error}") from error


def _parquet(file: Path) -> Iterator[tuple[Place, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DatasetError(
            f"reading {file} needs pyarrow: pip install 'streamrl[parquet]', or convert the file to jsonl"
        ) from error
    number = 0
    with file.open("rb") as source:
        try:
            for batch in parquet.ParquetFile(source).iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield Place(file, "row", number), row
        except ArrowException as error:
            raise DatasetError(f"{file}: not a readable parquet file (after row {number}): {error}") from error


READERS: dict[str, Callable[[Path], Iterator[tuple[Place, Any]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
}


def found(value: Any) -> str:
    """A value for an error message: its type and its beginning."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
