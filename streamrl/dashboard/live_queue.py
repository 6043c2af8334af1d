"""The run's queue, asked while it lives: what only it knows (leases, fields, units), and depths between two steps."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from transfer_queue.client import QueueClient
from transfer_queue.errors import QueueError
from transfer_queue.net.ending import is_held
from transfer_queue.net.messages import QueueStats
from transfer_queue.service.queue_service import read_address

log = logging.getLogger(__name__)

FRAME_SECONDS = 0.5
"""The queue is asked no more often."""

WATCH_SECONDS = 1.0
"""A wait for a change of groups ends after this: rows without groups wake nobody."""

CALL_SECONDS = 10.0


class LiveQueue:
    """Consumes: changes of the training partition. Produces: the queue's stats, for `tell` (None: it is gone).
    Woken by: the queue; while there is none, by `again`, which returns when it is time for another look."""

    def __init__(
        self, directory: Path, partition: str, tell: Callable[[QueueStats | None], None],
        again: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._directory = directory
        self._partition = partition
        self._tell = tell
        self._again = again
        self.client: QueueClient | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if (self._directory / "run.json").exists() and is_held(self._directory / "service.lock"):
                try:
                    await self._follow()
                except (QueueError, OSError, TimeoutError) as error:
                    log.debug("the queue in %s does not answer: %s", self._directory, error)
                finally:
                    self._tell(None)
            await self._again()

    async def replay(self, partition: str, uids: Sequence[str]) -> None:
        """Dead groups begin again. Raises QueueError; RuntimeError where the queue does not run."""
        if self.client is None:
            raise RuntimeError("the queue of this run does not run; dead groups can be replayed while it does")
        async with asyncio.timeout(CALL_SECONDS):
            await self.client.replay(partition, uids)

    async def _follow(self) -> None:
        address = read_address(self._directory)
        client = await QueueClient.connect(address, name=f"dashboard-{os.getpid()}", timeout=CALL_SECONDS)
        try:
            self.client = client
            since = -1
            while True:
                async with asyncio.timeout(CALL_SECONDS):
                    stats = await client.stats(details=True)
                self._tell(stats)
                await asyncio.sleep(FRAME_SECONDS)
                if self._partition in stats.partitions:
                    since = (await client.watch(self._partition, since, wait=WATCH_SECONDS)).seq
                else:
                    await asyncio.sleep(WATCH_SECONDS)
        finally:
            self.client = None
            await client.close()
