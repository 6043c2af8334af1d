"""The verbs of QueueClient that name rows by serial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from transfer_queue.clients.arguments import names_of
from transfer_queue.net.bounds import check_count, check_wait
from transfer_queue.net.messages import (
    AdoptPartitions,
    Clear,
    ClearPartition,
    Fetch,
    Find,
    Mutation,
    Ok,
    Query,
    ResetConsumption,
    Rows,
)

R = TypeVar("R")

USUAL_WAIT = 60.0
"""Seconds that a fetch waits for rows if nobody says how long."""

CLEARED_AT_ONCE = 16384
"""Rows that one request removes: about 50 ms, in which nobody else is served."""

PAGE_ROWS = 20_000
"""Rows that are asked for at once when all are wanted."""


class RowVerbs:
    """What a client can ask about rows by serial. Serials are int64, packed; see Rows."""

    async def _ask(self, body: Mutation | Query, kind: type[R], wait: float = 0.0) -> R:
        raise NotImplementedError

    async def find(
        self, partition: str, *, keys: Sequence[str] | None = None, rows: bytes | None = None,
        fields: Sequence[str] | None = None, task: str = "", after: int = -1, count: int = 0, located: bool = False,
    ) -> Rows:  # fmt: skip
        """Rows of `keys` (missing ones are left out), of serials, or `count` after a serial. Raises NotFound for an
        unknown partition, StorageKeyNotFoundError for serials whose rows are gone."""
        names = None if keys is None else names_of("keys", keys)
        wanted = None if fields is None else names_of("fields", fields)
        return await self._ask(Find(partition, names, rows, wanted, task, after, count, located), Rows)

    async def find_all(self, partition: str, fields: Sequence[str], *, task: str = "") -> Rows:
        """All rows of a partition, asked for page by page, so that nobody else waits for it: each row as it is when its
        page is asked for. Raises NotFound for an unknown partition."""
        pages = [await self.find(partition, fields=fields, task=task, count=PAGE_ROWS)]
        while pages[-1].more and pages[-1].rows:
            last = int.from_bytes(pages[-1].rows[-8:], "little")
            pages.append(await self.find(partition, fields=fields, task=task, after=last, count=PAGE_ROWS))
        return _joined(pages)

    async def fetch(
        self, partition: str, task: str, fields: Sequence[str], count: int, *,
        sampling: Mapping[str, Any] | None = None, wait: float | None = None, drained: bool = False,
    ) -> Rows:  # fmt: skip
        """`count` rows that have all the fields, consumed by `task` at once. Raises DeadlineExceeded after `wait`;
        None: as the queue is set, no rows at once (polling) or USUAL_WAIT. `drained`: no rows once all are consumed."""
        poll, wait = wait is None, USUAL_WAIT if wait is None else check_wait(wait)
        names = names_of("fields", fields)
        body = Fetch(partition, task, names, check_count("count", count), dict(sampling or {}), wait, drained, poll)
        return await self._ask(body, Rows, wait)

    async def reset_consumption(self, partition: str, task: str | None = None) -> None:
        """The task (None: every task) has consumed nothing. Raises NotFound for an unknown partition."""
        await self._ask(ResetConsumption(partition, task), Ok)

    async def clear_rows(self, partition: str, rows: bytes) -> None:
        """Remove rows by serial; those that are gone are no error."""
        for at in range(0, max(1, len(rows)), 8 * CLEARED_AT_ONCE):
            await self._ask(Clear(partition, [], rows[at : at + 8 * CLEARED_AT_ONCE]), Ok)

    async def clear_partition(self, partition: str) -> None:
        """Remove all rows, and the partition. Raises NotFound, or Conflict if groups in it are not done."""
        await self._ask(ClearPartition(partition), Ok)

    async def adopt(
        self, names: Mapping[str, str], consumed: Mapping[str, Mapping[str, bytes]], rows: Mapping[str, int]
    ) -> None:
        """Partitions filled under other names, each with so many rows, take the place of those named. Raises NotFound,
        and Conflict if rows are missing or a partition has groups or tasks."""
        taken = {staged: dict(tasks) for staged, tasks in consumed.items()}
        await self._ask(AdoptPartitions(dict(names), taken, dict(rows)), Ok)


def _joined(pages: Sequence[Rows]) -> Rows:
    """One answer out of those for the same fields."""
    if len(pages) == 1:
        return pages[0]
    columns = zip(*(page.schema for page in pages), strict=True)
    schema = [next((one for one in same if one.dtype), same[0]) for same in columns]
    return Rows(
        rows=b"".join(page.rows for page in pages),
        keys=[key for page in pages for key in page.keys],
        tags=[tag for page in pages for tag in page.tags],
        schema=schema,
        have=[b"".join(parts) for parts in zip(*(page.have for page in pages), strict=True)],
        consumed=b"".join(page.consumed for page in pages),
    )
