"""The thin Ray actor around the queue's plain processes: it only starts, supervises and stops them."""

from __future__ import annotations

from typing import Any

from transfer_queue.cluster import QueueService


class QueueNode:
    """Controller and storage units of one node. Restarted by Ray, it goes on from the journal in `directory`."""

    def __init__(self, directory: str, **settings: Any) -> None:
        self._service = QueueService(directory, **settings)

    async def start(self) -> dict[str, str]:
        """The address for clients."""
        await self._service.start()
        return self._service.address

    async def pids(self) -> dict[str, int]:
        return self._service.pids()

    async def stop(self, clean: bool) -> None:
        """End the processes; `clean` removes the stored rows too."""
        await self._service.stop(clean=clean)
