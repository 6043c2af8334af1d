"""The thin Ray actor around the queue's plain processes: it only starts, supervises and stops them."""

from __future__ import annotations

import asyncio
from typing import Any

from transfer_queue.cluster import QueueService


class QueueNode:
    """Controller and storage units of one node. Restarted by Ray, it goes on from the journal in `directory`."""

    def __init__(self, directory: str, **settings: Any) -> None:
        self._service = QueueService(directory, **settings)
        self._service.start()

    async def address(self) -> dict[str, str]:
        """For clients."""
        return self._service.address

    async def stop(self, clean: bool) -> None:
        """End the processes; `clean` removes the stored rows too."""
        await asyncio.to_thread(self._service.stop, clean=clean)
