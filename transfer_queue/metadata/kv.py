"""Rows by key."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transfer_queue.net.messages import Token


@dataclass
class KVBatchMeta:
    """Keys of rows with their tags, and the fields that all of them have.

    Invariants: one tag dict per key; no key and no field twice (ValueError). `tags` and `extra_info` are copied, each
    tag by itself, so that changing them here changes them nowhere else. `token` fences writes made under a lease. All
    attributes may be assigned.
    """

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)
    token: Token | None = None

    def __post_init__(self) -> None:
        if len(self.tags) != len(self.keys):
            raise ValueError(f"{len(self.keys)} keys but {len(self.tags)} tags; give one tag dict per key")
        _refuse_duplicates("keys", self.keys)
        _refuse_duplicates("fields", self.fields or [])
        self.keys = list(self.keys)
        self.tags = [_copied(tag) for tag in self.tags]
        self.extra_info = copy.deepcopy(self.extra_info)

    @classmethod
    def of_answer(
        cls, keys: list[str], tags: list[dict[str, Any]], partition_id: str, fields: list[str] | None,
        token: Token | None = None,
    ) -> KVBatchMeta:  # fmt: skip
        """For the queue's own answers, whose lists nobody else has and whose keys were checked: nothing is copied."""
        meta = cls.__new__(cls)
        meta.keys, meta.tags, meta.partition_id, meta.fields = keys, tags, partition_id, fields
        meta.extra_info, meta.token = {}, token
        return meta

    @property
    def size(self) -> int:
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta({self.size} rows of {self.partition_id!r}, fields {self.fields})"

    def select_keys(self, keys: Sequence[str]) -> KVBatchMeta:
        """The rows of these keys, in this order. Raises ValueError for duplicates, RuntimeError for unknown keys."""
        _refuse_duplicates("keys", keys)
        place = {key: i for i, key in enumerate(self.keys)}
        unknown = [key for key in keys if key not in place]
        if unknown:
            raise RuntimeError(f"keys {unknown[:5]} are not in this batch of {self.size} rows")
        return self._rows([place[key] for key in keys])

    def reorder(self, indexes: Sequence[int]) -> None:
        """Put the rows in another order, in place. Raises ValueError unless `indexes` is a permutation."""
        if sorted(indexes) != list(range(self.size)):
            raise ValueError(f"{list(indexes)[:8]} is not a permutation of the {self.size} rows")
        self.keys = [self.keys[i] for i in indexes]
        self.tags = [self.tags[i] for i in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """`chunks` consecutive pieces; the first ones get one row more where it does not divide; may be empty."""
        if chunks <= 0:
            raise ValueError(f"cannot cut a batch into {chunks} pieces")
        size, more = divmod(self.size, chunks)
        pieces, start = [], 0
        for i in range(chunks):
            end = start + size + (i < more)
            pieces.append(self._rows(range(start, end)))
            start = end
        return pieces

    @classmethod
    def concat(cls, metas: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """All rows of the non-empty batches. Raises ValueError if fields, partition or extra_info contradict."""
        parts = [meta for meta in metas if meta.size]
        if not parts:
            return cls(extra_info=None)
        first, extra = parts[0], {}
        for part in parts:
            if part.partition_id != first.partition_id or set(part.fields or []) != set(first.fields or []):
                raise ValueError(f"cannot join {first} and {part}: partition and fields must be the same")
            for name, value in (part.extra_info or {}).items():
                if name in extra and not _same(extra[name], value):
                    raise ValueError(f"cannot join batches: extra_info[{name!r}] is {extra[name]!r} and {value!r}")
                extra[name] = value
        keys = [key for part in parts for key in part.keys]
        tags = [tag for part in parts for tag in part.tags]
        token = first.token if all(part.token == first.token for part in parts) else None
        return cls(keys, tags, first.partition_id, first.fields, extra, token)

    def _rows(self, indexes: Sequence[int]) -> KVBatchMeta:
        keys, tags = [self.keys[i] for i in indexes], [self.tags[i] for i in indexes]
        fields = list(self.fields) if self.fields is not None else None
        return KVBatchMeta(keys, tags, self.partition_id, fields, self.extra_info, self.token)


_PLAIN = (str, int, float, bool, type(None))


def _copied(tag: dict[str, Any]) -> dict[str, Any]:
    """A deep copy; several times quicker for the usual tag of plain values."""
    return dict(tag) if all(type(value) in _PLAIN for value in tag.values()) else copy.deepcopy(tag)


def _refuse_duplicates(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if list(names).count(name) > 1})
        raise ValueError(f"duplicate {what}: {twice[:5]}")


def _same(a: Any, b: Any) -> bool:
    """Equality that arrays answer too (elementwise results count only if all are true)."""
    equal = a == b
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
