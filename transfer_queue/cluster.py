"""The two ways to have a queue: in this process (LocalQueue), or as processes of their own (QueueService)."""

from __future__ import annotations

from transfer_queue.local import LocalQueue
from transfer_queue.service import QueueService, read_address

__all__ = ["LocalQueue", "QueueService", "read_address"]
