"""The queue's part of a checkpoint: which prompts are out after a step, and the rows of those that are finished.

    after step k:        what is out and what is finished ─► its rows are copied to memory ─► written to `queue/`
    restored to step k:  what the queue lacks of them is ready again, the rest of what was out is issued again

The queue loses nothing when processes die, so a resume on the same machine finds these groups in it and leaves them
alone. The rows here are for where it has lost them: with a node, its memory, the journal, or because the checkpoint
was copied to another run directory. Nothing of the cut is dropped or acked before it is copied: so it is exact,
whatever is trained while it is written.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transfer_queue.checkpoint import GroupsCopy, copy_groups, load_groups, write_groups
from transfer_queue.checkpoint.groups import FINISHED
from transfer_queue.client import QueueClient
from transfer_queue.net.messages import Group

log = logging.getLogger(__name__)

DIRECTORY = "queue"
"""Of a checkpoint."""

AUTO_BYTES = 1 << 30
"""What `auto` stores at most: the copy takes the trainer's memory, and a second or two of its time."""

Include = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class Cut:
    """After a step: the next dispatch order, those that are out, and their finished groups, oldest first."""

    next_order: int
    outstanding: list[int]
    finished: list[Group]


class QueueCut:
    """Of one partition, whose prompts `task` leases. `computed`: fields that ranks write, which are not kept."""

    def __init__(
        self, queue: QueueClient, partition: str, task: str, *, include: Include, computed: Collection[str]
    ) -> None:
        self._queue, self._partition, self._task = queue, partition, task
        self._include, self._computed = include, computed

    async def take(self, *, rows: bool = True) -> Cut:
        """While nothing is trained. A group that leaves between the two questions is not out, so not in it."""
        rows = rows and self._include != "never"
        groups = (await self._queue.watch(self._partition, -1)).groups if rows else []
        stats = (await self._queue.stats(orders=True)).partitions[self._partition]
        out = set(stats.outstanding)
        finished = [group for group in groups if group.state in FINISHED and group.order in out]
        return Cut(stats.next_order, stats.outstanding, sorted(finished, key=lambda group: group.order))

    async def copy(self, cut: Cut) -> GroupsCopy:
        """The rows of its finished groups, in memory; of `auto` only those that have room."""
        limit = AUTO_BYTES if self._include == "auto" else None
        copy = await copy_groups(self._queue, self._partition, cut.finished, without=self._computed, limit=limit)
        if (left_out := len(cut.finished) - len(copy.uids)) > 0:
            log.info(
                "the checkpoint holds the rows of %d finished groups (%d bytes), and not of %d: "
                "trainer.ckpt_include_rows=always stores all",
                len(copy.uids), copy.nbytes, left_out,
            )  # fmt: skip
        return copy

    def write(self, copy: GroupsCopy, checkpoint: Path) -> None:
        """Blocking. Nothing for no groups."""
        if copy.uids:
            write_groups(copy, checkpoint / DIRECTORY)

    async def restore(self, checkpoint: Path, *, version: int | None) -> list[str]:
        """Make ready what the queue lacks of the checkpoint's groups; their uids. Those with a token of weights above
        `version` are left out. Raises QueueError."""
        directory = checkpoint / DIRECTORY
        if not directory.is_dir():
            return []
        return await load_groups(self._queue, directory, self._partition, self._task, version=version)
