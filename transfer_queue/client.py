"""The queue's clients: `QueueClient` for code with an event loop, `SyncQueueClient` for code without; TransferQueue's
low-level clients stand beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer_queue.clients.async_client import QueueClient
from transfer_queue.clients.sync_client import SyncQueueClient

if TYPE_CHECKING:
    from transfer_queue.clients.batch_client import AsyncTransferQueueClient, TransferQueueClient

__all__ = ["AsyncTransferQueueClient", "QueueClient", "SyncQueueClient", "TransferQueueClient"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transfer_queue.clients import batch_client

    return getattr(batch_client, name)
