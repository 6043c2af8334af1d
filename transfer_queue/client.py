"""The queue's clients: `QueueClient` for code with an event loop, `SyncQueueClient` for code without."""

from __future__ import annotations

from transfer_queue.async_client import QueueClient
from transfer_queue.sync_client import SyncQueueClient

__all__ = ["QueueClient", "SyncQueueClient"]
