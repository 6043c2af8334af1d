"""`data_parser` by name: a function over the fields of a put, known to the process that puts. Code crosses no wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transfer_queue.errors import Invalid
from transfer_queue.storage.columns import Column
from transfer_queue.storage.convert import as_columns

DataParser = Callable[[dict[str, Any]], Mapping[str, Any]]
"""From fields to fields of as many rows: {field: one entry per row} both ways."""

_parsers: dict[str, DataParser] = {}


def register_data_parser(name: str, parser: DataParser) -> None:
    """Make `parser` known under a name, for `kv_put` and its like in this process; again replaces it."""
    if not callable(parser):
        raise Invalid(f"data parser {name!r} is a {type(parser).__qualname__}, not a function")
    _parsers[name] = parser


def parse(name: str | None, columns: dict[str, Column], rows: int) -> dict[str, Column]:
    """The columns that the parser of this name makes of these (None: they themselves). Raises Invalid."""
    if name is None:
        return columns
    if not isinstance(name, str):
        raise Invalid(
            "data_parser is a function, and functions are not sent around: register it by "
            "transfer_queue.register_data_parser(name, function) and give its name"
        )
    if name not in _parsers:
        raise Invalid(f"no data parser {name!r} is registered in this process; there are {sorted(_parsers)}")
    result = _parsers[name]({field: _given(column) for field, column in columns.items()})
    if not isinstance(result, Mapping):
        raise Invalid(f"data parser {name!r} returned a {type(result).__qualname__}; expected fields by name")
    return as_columns(result, rows)


def _given(column: Column) -> Any:
    """One entry per row."""
    return column.values if column.kind == "dense" else column.rows_list()
