"""Rows whose stored bytes were changed under the queue: the groups they belong to leave, so that the run can go on.

A rank that reads such a row raises Corrupt, and the update is lost with it: the weights may have moved by a part of it.
The run ends; without more, it would end in the same way each time it is resumed. So before it ends, the groups of the
batch that cannot be read are found, and dropped. What lies elsewhere is found when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.errors import UserError
from streamrl.trainer.replay_buffer import LeasedBatch
from transfer_queue.client import QueueClient
from transfer_queue.errors import Corrupt

DAMAGED = "damaged"
"""Reason of a group that was dropped for it."""


class DamagedRows(UserError):
    """Rows of the queue cannot be read; their groups were dropped."""


def is_damage(error: BaseException) -> bool:
    """Whether damaged rows are what it came from, here or on a rank."""
    return any(isinstance(each, Corrupt) or f"{Corrupt.__name__}: " in str(each) for each in _chain(error))


async def drop_damaged(queue: QueueClient, partition: str, batch: LeasedBatch) -> DamagedRows:
    """Drop the groups of `batch` that cannot be read; the error that says so."""
    found: dict[str, str] = {}
    for group in batch.groups:
        try:
            await queue.get(partition, [row.key for row in group.rows])
        except Corrupt as error:
            found[group.uid] = str(error)
    await queue.drop(partition, list(found), DAMAGED)
    first = next(iter(found.values()), "by now all rows can be read")
    return DamagedRows(
        f"{len(found)} of the {len(batch.groups)} groups of this update are damaged and were dropped "
        f"({', '.join(found)}): {first}. Look at the disk and memory of that node; the "
        "same command goes on without them"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = getattr(current, "cause", None) or current.__cause__ or current.__context__
