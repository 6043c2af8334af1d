"""What a sampler is, and the plainest one."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Indexes = Sequence[int] | np.ndarray
"""Rows by serial."""


class PartitionView(Protocol):
    """What a sampler may know of the partition it samples from."""

    partition_id: str

    @property
    def custom_meta(self) -> Mapping[int, dict[str, Any]]:
        """Tags by serial."""
        ...

    def tag_values(self, name: str, indexes: Indexes) -> list[Any]:
        """One tag of each row, None where it is missing."""
        ...

    def tag_numbers(self, name: str, indexes: Indexes) -> np.ndarray:
        """The same as float64, nan where it is missing: quick for all rows there are. Raises ValueError or TypeError if
        a tag is no number."""
        ...


class BaseSampler(ABC):
    """Chooses rows for one fetch. `sample` gets the serials that are ready and not consumed by the task, ascending.

    It returns (sampled, consumed): the rows of the answer, in order, and those that the task will not see again; none
    (`[], []`) means that the fetch goes on waiting. It is called in the controller, with what the fetch's
    `sampling_config` says as keywords, and `partition` (a PartitionView), `partition_id` and `task_name`.
    The choice is journaled, so a sampler need not be repeatable. One that answers several fetches at once (the ranks of
    a data-parallel group) says so by `remember`; those answers are journaled with the choice.
    """

    takes_arrays = False
    """Whether `ready_indexes` may be an int64 array instead of a list."""

    takes_oldest = False
    """Whether an answer that is not empty stays as it is if younger rows were ready, too: then it need not see all."""

    def __init__(self) -> None:
        self._cache: dict[str, dict[str, dict[str, Indexes]]] = {}

    @abstractmethod
    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> tuple[Indexes, Indexes]: ...

    def __call__(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> tuple[Indexes, Indexes]:
        return self.sample(ready_indexes, batch_size, *args, **kwargs)

    def parameters(self) -> dict[str, Any]:
        """What to construct this sampler with, as plain values: only its name and these travel to the controller."""
        return {}

    # --- answers to several fetches at once ---------------------------------------------------------------------

    def cache_key(self, sampling_config: Mapping[str, Any]) -> str | None:
        """The name of a fetch; fetches of one name get the same answer. None: each gets its own."""
        return None

    def remember(self, partition_id: str, task_name: str, answers: Mapping[str, Indexes]) -> None:
        """Answers by `cache_key`, to be given when those fetches come."""
        self._cache.setdefault(partition_id, {}).setdefault(task_name, {}).update(answers)

    def remembered(self, partition_id: str, task_name: str) -> dict[str, Indexes]:
        return self._cache.get(partition_id, {}).get(task_name, {})

    def has_cached_result(self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None) -> bool:
        """Whether the answer to this fetch is known already, so that it need not wait for ready rows."""
        key = self.cache_key(sampling_config or {})
        return key is not None and key in self.remembered(partition_id, task_name)

    def clear_cache(self, partition_id: str) -> None:
        self._cache.pop(partition_id, None)

    def save_checkpoint(self, path: str | Path) -> None:
        """Write what is remembered, as JSON. In a controller the journal has it already."""
        Path(path).write_text(json.dumps(self._cache, default=lambda rows: np.asarray(rows, np.int64).tolist()))

    def load_checkpoint(self, path: str | Path) -> None:
        self._cache = json.loads(Path(path).read_text())


class SequentialSampler(BaseSampler):
    """The oldest rows first."""

    takes_arrays = True
    takes_oldest = True

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> tuple[Indexes, Indexes]:
        sampled = ready_indexes[:batch_size]
        return sampled, sampled


def no_rows() -> tuple[Indexes, Indexes]:
    return [], []
