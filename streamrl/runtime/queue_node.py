"""The thin Ray actor around the queue's plain processes: it only starts, supervises and stops them."""

from __future__ import annotations

import asyncio
from typing import Any

from transfer_queue.cluster import QueueService
from transfer_queue.errors import QueueError


class QueueNode:
    """Controller and storage units of one node. Restarted by Ray, it goes on from the journal in `directory`."""

    def __init__(self, directory: str, **settings: Any) -> None:
        self._service: QueueService | None = None
        self._failure: QueueError | None = None
        try:
            self._service = QueueService(directory, **settings)
            self._service.start()
        except QueueError as error:  # an actor whose constructor raises would only say that it died
            self._failure = error

    async def address(self) -> dict[str, str]:
        """For clients. Raises the QueueError that kept the queue from starting."""
        if self._failure is not None or self._service is None:
            raise self._failure or RuntimeError("the queue was not started")
        return self._service.address

    async def stop(self, clean: bool) -> None:
        """End the processes; `clean` removes the stored rows too."""
        if self._service is not None:
            await asyncio.to_thread(self._service.stop, clean=clean)
