"""Fetches in the controller: which rows a task gets. The ledger learns the choice, never how it was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from transfer_queue.errors import Invalid, QueueError
from transfer_queue.ledger import Ledger
from transfer_queue.ledger.checks import some
from transfer_queue.ledger.consuming import describe, ready
from transfer_queue.ledger.order import packed
from transfer_queue.ledger.partition import Partition
from transfer_queue.ledger.tag_columns import entry_of
from transfer_queue.ledger.tags import unpack
from transfer_queue.net.messages import Consume, Fetch, Rows
from transfer_queue.sampler import BaseSampler, SequentialSampler

_NONE = np.empty(0, np.int64)


class Fetching:
    """Answers fetches by the sampler. With `polling`, one that finds too few rows gets none at once."""

    def __init__(self, sampler: BaseSampler | None = None, *, polling: bool = False) -> None:
        self.polling = polling
        self._sampler = sampler if sampler is not None else SequentialSampler()
        self._hopeless: dict[str, dict[tuple[Any, ...], int]] = {}
        """By partition, for fetches that found too few rows: how many rows must have been touched until one can not."""

    def answer(self, ledger: Ledger, m: Fetch) -> Consume | Rows | None:
        """What to apply and answer, what to answer only, or None if there are too few rows. Raises Invalid."""
        _check(m)
        p = ledger.partitions.get(m.partition)
        found = None if p is None else self._choose(p, m)
        if found is not None:
            return found
        return Rows() if (self.polling and m.poll) or (m.drained and _drained(p, m.task)) else None

    def wording(self, ledger: Ledger, m: Fetch, waited: float) -> str:
        """Why a fetch got nothing."""
        p = ledger.partitions.get(m.partition)
        if p is None:
            have = (
                f"nobody has put anything to it yet (partitions that exist: {some(list(ledger.partitions)) or 'none'})"
            )
        else:
            left = sum(len(serials) for serials, _ in p.consumption.slices(p.rows.order, m.task))
            whole = len(ready(p, m.task, m.fields)[0])
            have = f"{left} of its {len(p.rows.ids)} rows are not consumed, {whole} of them have all the fields"
        return (
            f"task {m.task!r} waited {waited:.1f} s for {m.count} rows of {m.partition!r} with {m.fields}: {have} "
            f"({type(self._sampler).__name__} chooses). Is the producer running, and does it write these fields?"
        )

    def forget(self, partition: str) -> None:
        """The partition was cleared, or its consumption reset."""
        self._sampler.clear_cache(partition)
        self._hopeless.pop(partition, None)

    def _choose(self, p: Partition, m: Fetch) -> Consume | Rows | None:
        config = {**m.sampling, "partition_id": p.name, "task_name": m.task}
        key = _guarded(self._sampler, self._sampler.cache_key, config)
        known = p.consumption.recall(m.task, key) if key is not None else None
        if known is not None:
            return describe(p, p.rows.order.require(known, p.name), m.fields, m.task)
        cached = _guarded(self._sampler, self._sampler.has_cached_result, p.name, m.task, config)
        waiting = (m.task, tuple(m.fields), m.count)
        hopeless = self._hopeless.setdefault(p.name, {})
        if not cached and p.rows.touched < hopeless.get(waiting, 0):
            return None
        sampled, taken, missing = self._sample(p, m, config, cached)
        if not len(sampled):
            hopeless[waiting] = p.rows.touched + missing
            return None
        hopeless.pop(waiting, None)
        remember = {}
        if key is not None:
            answers = self._sampler.remembered(p.name, m.task)
            remember = {name: packed(np.asarray(rows, np.int64)) for name, rows in answers.items()}
            self._sampler.clear_cache(p.name)
        return Consume(p.name, m.task, list(m.fields), packed(sampled), packed(taken), remember)

    def _sample(
        self, p: Partition, m: Fetch, config: dict[str, Any], cached: bool
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """What the sampler chose and consumed of the rows that are ready; or how many rows must change at least before
        it makes sense to ask it again. A sampler that takes the oldest is shown no more than it needs."""
        wanted, more = (m.count if self._sampler.takes_oldest else 0), True
        while True:
            serials, rows, more = ready(p, m.task, m.fields, wanted)
            if len(serials) < m.count and not cached:
                return _NONE, _NONE, m.count - len(serials)
            given = serials if self._sampler.takes_arrays else serials.tolist()
            answer = _guarded(self._sampler, self._sampler, given, m.count, **config, partition=_View(p, serials, rows))
            sampled, taken = self._checked(p, answer, serials, cached)
            if len(sampled) or not more:
                return sampled, taken, 1
            wanted = 8 * len(serials)

    def _checked(self, p: Partition, answer: Any, serials: np.ndarray, cached: bool) -> tuple[np.ndarray, np.ndarray]:
        """What a sampler returned, as arrays. Raises Invalid for rows that it was not offered."""
        try:
            sampled, taken = (np.asarray(rows, np.int64).reshape(-1) for rows in answer)
        except (TypeError, ValueError) as error:
            name = type(self._sampler).__name__
            raise Invalid(f"sampler {name} returned {answer!r:.80}; expected (sampled, consumed) indexes") from error
        if not cached and not (_among(sampled, serials) and _among(taken, serials)):
            raise Invalid(f"sampler {type(self._sampler).__name__} chose rows of {p.name!r} that are not ready")
        if len(np.unique(sampled)) != len(sampled):
            raise Invalid(f"sampler {type(self._sampler).__name__} chose a row twice")
        return sampled, taken


def _among(some: np.ndarray, ascending: np.ndarray) -> bool:
    if not len(some) or not len(ascending):
        return not len(some)
    return bool((ascending[np.minimum(np.searchsorted(ascending, some), len(ascending) - 1)] == some).all())


class _View:
    """What samplers see of a partition."""

    def __init__(self, p: Partition, serials: np.ndarray, rows: np.ndarray) -> None:
        """`serials` are those that the sampler is offered, `rows` their ids."""
        self._p = p
        self._offered = serials, rows
        self.partition_id = p.name

    @property
    def custom_meta(self) -> Mapping[int, dict[str, Any]]:
        return _Tags(self._p)

    def tag_values(self, name: str, indexes: Any) -> list[Any]:
        one, tags = entry_of(name), self._p.rows.tags
        return [one(tags[row]).value for row in self._rows(indexes).tolist()]

    def tag_numbers(self, name: str, indexes: Any) -> np.ndarray:
        return self._p.rows.tag_columns.numbers(name, self._p.rows.tags, self._rows(indexes))

    def _rows(self, indexes: Any) -> np.ndarray:
        serials, rows = self._offered
        return rows if indexes is serials else self._p.rows.order.require(np.asarray(indexes, np.int64), self._p.name)


class _Tags(Mapping[int, dict[str, Any]]):
    """Tags by serial."""

    def __init__(self, p: Partition) -> None:
        self._p = p

    def __getitem__(self, serial: int) -> dict[str, Any]:
        row = int(self._p.rows.order.find(np.asarray([serial], np.int64))[0])
        if row < 0:
            raise KeyError(serial)
        return unpack(self._p.rows.tags[row])

    def __iter__(self) -> Iterator[int]:
        return iter(self._p.rows.order.after(-1)[0].tolist())

    def __len__(self) -> int:
        return len(self._p.rows.ids)


def _drained(p: Partition | None, task: str) -> bool:
    if p is None or not p.rows.ids:
        return False
    return not any(len(serials) for serials, _ in p.consumption.slices(p.rows.order, task))


def _check(m: Fetch) -> None:
    if m.count < 1:
        raise Invalid(f"batch_size={m.count}; expected at least 1")
    if not m.task:
        raise Invalid("a fetch needs a task_name: it is the task that consumes the rows")


def _guarded(sampler: BaseSampler, function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of somebody's sampler: what it raises is an answer to the fetch, not the end of the controller."""
    try:
        return function(*args, **kwargs)
    except QueueError:
        raise
    except Exception as error:
        raise Invalid(f"sampler {type(sampler).__name__}: {type(error).__name__}: {error}") from error
