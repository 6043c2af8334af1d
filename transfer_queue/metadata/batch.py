"""Rows by serial, columnar."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.metadata.schema import Schema, extract_field_schema, rows_of_schema

if TYPE_CHECKING:
    from tensordict import TensorDict

Tag = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SampleMeta:
    """One row of a BatchMeta, as a view."""

    batch: BatchMeta
    row: int

    @property
    def global_index(self) -> int:
        return int(self.batch.indexes[self.row])

    @property
    def partition_id(self) -> str:
        return self.batch.partition_ids[self.row]

    @property
    def production_status(self) -> int:
        return int(self.batch.production_status[self.row])

    @property
    def custom_meta(self) -> Tag:
        return self.batch.custom_meta[self.row]

    @property
    def fields(self) -> Schema:
        """The schema of the row's fields."""
        return rows_of_schema(self.batch.field_schema, slice(self.row, self.row + 1))


class BatchMeta:
    """Rows named by serial (`global_indexes`), with what is known of their fields.

    A serial names one row for ever: a BatchMeta that outlives its rows finds none, never others. Pieces cut from a
    batch share its arrays and tags. `production_status` is 1 for rows that have all the fields of the batch;
    `custom_meta` are their tags. `extra_info` may be assigned. Rows of several partitions may stand in one batch.
    """

    __slots__ = ("_partitions", "custom_meta", "extra_info", "field_schema", "indexes", "production_status")

    def __init__(
        self,
        global_indexes: Sequence[int] | np.ndarray = (),
        partition_ids: Sequence[str] = (),
        field_schema: Mapping[str, Mapping[str, Any]] | None = None,
        production_status: Sequence[int] | np.ndarray | None = None,
        extra_info: dict[str, Any] | None = None,
        custom_meta: Sequence[Tag] | None = None,
        _custom_backend_meta: object = None,
    ) -> None:
        """Raises ValueError unless everything that is given per row has one entry per row."""
        self.indexes = np.array(global_indexes, np.int64)
        self._partitions: str | list[str] = _one_or_all(partition_ids)
        self.field_schema: Schema = {str(name): dict(one) for name, one in (field_schema or {}).items()}
        status = np.zeros(self.size, np.int8) if production_status is None else np.array(production_status, np.int8)
        self.production_status: np.ndarray = status
        self.extra_info: dict[str, Any] = extra_info if extra_info is not None else {}
        self.custom_meta: list[Tag] = [{} for _ in self.indexes] if custom_meta is None else list(custom_meta)
        given = (("partition_ids", partition_ids), ("production_status", status), ("custom_meta", self.custom_meta))
        for name, values in given:
            if len(values) != self.size:
                raise ValueError(f"{self.size} global_indexes but {len(values)} {name}; give one per row")

    # --- views --------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return len(self.indexes)

    @property
    def global_indexes(self) -> list[int]:
        return self.indexes.tolist()

    @property
    def partition_ids(self) -> list[str]:
        """The partition of each row."""
        return [self._partitions] * self.size if isinstance(self._partitions, str) else self._partitions

    @property
    def field_names(self) -> list[str]:
        return sorted(self.field_schema)

    @property
    def samples(self) -> list[SampleMeta]:
        return [SampleMeta(self, row) for row in range(self.size)]

    @property
    def is_ready(self) -> bool:
        """Whether there are rows, and all of them have all fields."""
        return self.size > 0 and bool((self.production_status == 1).all())

    def get_dtypes(self, field: str) -> list[Any]:
        """The dtype of the field in each row. Raises KeyError."""
        return [self.field_schema[field]["dtype"]] * self.size

    def get_shapes(self, field: str) -> list[Any]:
        """The shape of the field in each row, None where that is not known. Raises KeyError."""
        one = self.field_schema[field]
        return list(one["per_sample_shapes"]) if "per_sample_shapes" in one else [one["shape"]] * self.size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[SampleMeta]:
        return iter(self.samples)

    def __getitem__(self, rows: int | slice) -> BatchMeta:
        if isinstance(rows, slice):
            return self._rows(rows)
        if not -self.size <= rows < self.size:
            raise IndexError(f"row {rows} of a batch of {self.size}")
        rows %= self.size
        return self._rows(slice(rows, rows + 1))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchMeta):
            return NotImplemented
        return (
            np.array_equal(self.indexes, other.indexes)
            and self.partition_ids == other.partition_ids
            and self.field_schema == other.field_schema
            and np.array_equal(self.production_status, other.production_status)
            and self.custom_meta == other.custom_meta
            and self.extra_info == other.extra_info
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        where = self._partitions if isinstance(self._partitions, str) else sorted(set(self._partitions))
        return f"BatchMeta({self.size} rows of {where!r}, fields {self.field_names}, ready {self.is_ready})"

    # --- extra_info and custom_meta -------------------------------------------------------------------------------

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        self.extra_info[key] = value

    def get_all_extra_info(self) -> dict[str, Any]:
        """A copy."""
        return dict(self.extra_info)

    def update_extra_info(self, info: Mapping[str, Any]) -> None:
        self.extra_info.update(info)

    def remove_extra_info(self, key: str) -> Any:
        """What stood there, or None."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        return key in self.extra_info

    def get_all_custom_meta(self) -> list[Tag]:
        """A copy, row by row."""
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: Sequence[Tag]) -> None:
        """Merge one dict into each row's; `set_custom_meta` of the client then stores them. Raises ValueError."""
        if len(custom_meta) != self.size:
            raise ValueError(f"{len(custom_meta)} custom_meta for {self.size} rows")
        self.custom_meta = [{**old, **new} for old, new in zip(self.custom_meta, custom_meta, strict=True)]

    def clear_custom_meta(self) -> None:
        self.custom_meta = [{} for _ in range(self.size)]

    # --- changing in place --------------------------------------------------------------------------------------

    def add_fields(self, data: TensorDict, set_all_ready: bool = True) -> BatchMeta:
        """Take note of the fields of `data`, one row per row here. Raises ValueError for another batch size."""
        if len(data) != self.size:
            raise ValueError(f"fields of batch size {len(data)} for a batch of {self.size} rows")
        self.field_schema.update(extract_field_schema(data))
        if set_all_ready:
            self.production_status = np.ones(self.size, np.int8)
        return self

    def reorder(self, indexes: Sequence[int]) -> None:
        """Put the rows in another order. Raises ValueError unless `indexes` is a permutation."""
        if sorted(indexes) != list(range(self.size)):
            raise ValueError(f"{list(indexes)[:8]} is not a permutation of the {self.size} rows")
        other = self._rows(np.asarray(indexes, np.int64))
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))

    # --- making others ------------------------------------------------------------------------------------------

    def select_samples(self, indexes: Sequence[int]) -> BatchMeta:
        """The rows at these places. Raises ValueError for a place that is none."""
        rows = np.asarray(indexes, np.int64)
        if len(rows) and not (rows.min() >= 0 and rows.max() < self.size):
            raise ValueError(f"rows {rows.min()} to {rows.max()} of a batch of {self.size}")
        return self._rows(rows)

    def select_fields(self, field_names: Iterable[str]) -> BatchMeta:
        """The batch with these fields only; names that it does not have are ignored."""
        wanted = set(field_names)
        schema = {name: one for name, one in self.field_schema.items() if name in wanted}
        return self._with(slice(None), schema)

    def copy(self) -> BatchMeta:
        """A batch that can be changed without changing this one."""
        return copy.deepcopy(self)

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """`chunks` consecutive pieces; the first ones get one row more where it does not divide; may be empty."""
        if chunks <= 0:
            raise ValueError(f"cannot cut a batch into {chunks} pieces")
        size, more = divmod(self.size, chunks)
        ends = [(i + 1) * size + min(i + 1, more) for i in range(chunks)]
        return [self._rows(slice(start, end)) for start, end in zip([0, *ends], ends, strict=False)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """One batch per partition, in order of their first rows."""
        if isinstance(self._partitions, str):
            return [self] if self.size else []
        places: dict[str, list[int]] = {}
        for row, name in enumerate(self._partitions):
            places.setdefault(name, []).append(row)
        return [self.select_samples(rows) for rows in places.values()]

    def union(self, other: BatchMeta) -> BatchMeta:
        """The fields, tags and extra_info of both (where both have one, the other's), of the same rows; ready where
        both are. Raises ValueError if the rows differ."""
        if not np.array_equal(self.indexes, other.indexes) or self.partition_ids != other.partition_ids:
            raise ValueError(f"union of {self} and {other}: they must be of the same rows in the same order")
        joined = self._with(slice(None), {**self.field_schema, **other.field_schema})
        joined.production_status = self.production_status & other.production_status
        joined.extra_info = {**self.extra_info, **other.extra_info}
        joined.update_custom_meta(other.custom_meta)
        return joined

    @classmethod
    def concat(cls, batches: Sequence[BatchMeta], validate: bool = True) -> BatchMeta:
        """All rows of the non-empty batches. Raises ValueError if their fields differ, unless told not to `validate`;
        then the fields that all have remain."""
        parts = [batch for batch in batches if batch.size]
        if not parts:
            return cls(extra_info=dict(batches[0].extra_info) if batches else None)
        names = set(parts[0].field_schema)
        for part in parts:
            if validate and set(part.field_schema) != names:
                raise ValueError(f"cannot join {parts[0]} and {part}: their fields differ")
            names &= set(part.field_schema)
        return cls(
            np.concatenate([part.indexes for part in parts]),
            [name for part in parts for name in part.partition_ids],
            {name: _joined([(part.field_schema[name], part.size) for part in parts]) for name in sorted(names)},
            np.concatenate([part.production_status for part in parts]),
            {name: value for part in parts for name, value in part.extra_info.items()},
            [tag for part in parts for tag in part.custom_meta],
        )

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> BatchMeta:
        return cls(extra_info=extra_info)

    def _rows(self, rows: slice | np.ndarray) -> BatchMeta:
        return self._with(rows, rows_of_schema(self.field_schema, rows))

    def _with(self, rows: slice | np.ndarray, schema: Schema) -> BatchMeta:
        """These rows, under a schema; arrays are shared where they can be."""
        piece = BatchMeta.__new__(BatchMeta)
        piece.indexes, piece.field_schema = self.indexes[rows], schema
        piece.production_status = self.production_status[rows]
        piece.extra_info = dict(self.extra_info) if self.extra_info else {}
        piece._partitions = self._partitions if isinstance(self._partitions, str) else _pick(self._partitions, rows)
        piece.custom_meta = _pick(self.custom_meta, rows)
        return piece


def _pick(values: list[Any], rows: slice | np.ndarray) -> list[Any]:
    return values[rows] if isinstance(rows, slice) else [values[row] for row in rows.tolist()]


def _one_or_all(partitions: Sequence[str]) -> str | list[str]:
    """One name stands for rows that are all of that partition."""
    names = list(partitions)
    return names[0] if names and names.count(names[0]) == len(names) else names


def _joined(ones: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, Any]:
    """The schema of one field over several batches: its shape if it is the same in all, else row by row."""
    first = dict(ones[0][0])
    if all("per_sample_shapes" not in one and one["shape"] == first["shape"] for one, _ in ones):
        return first
    shapes = [shape for one, size in ones for shape in (one.get("per_sample_shapes") or [one["shape"]] * size)]
    return {**first, "shape": None, "per_sample_shapes": shapes}
