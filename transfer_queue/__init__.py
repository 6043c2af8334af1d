"""transfer_queue: the queue between generation and training.

Use it as a key-value store (`init`, `kv_put`, `kv_batch_get`, ...), or through `QueueClient` with admission, leases and
watches. Nothing heavy is imported before it is used; torch and tensordict only when tensors are made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_queue.client import QueueClient as QueueClient
    from transfer_queue.client import SyncQueueClient as SyncQueueClient
    from transfer_queue.cluster import LocalQueue as LocalQueue
    from transfer_queue.cluster import QueueService as QueueService
    from transfer_queue.interface import async_kv_batch_get as async_kv_batch_get
    from transfer_queue.interface import async_kv_batch_get_by_meta as async_kv_batch_get_by_meta
    from transfer_queue.interface import async_kv_batch_put as async_kv_batch_put
    from transfer_queue.interface import async_kv_clear as async_kv_clear
    from transfer_queue.interface import async_kv_list as async_kv_list
    from transfer_queue.interface import async_kv_put as async_kv_put
    from transfer_queue.interface import close as close
    from transfer_queue.interface import get_client as get_client
    from transfer_queue.interface import init as init
    from transfer_queue.interface import kv_batch_get as kv_batch_get
    from transfer_queue.interface import kv_batch_get_by_meta as kv_batch_get_by_meta
    from transfer_queue.interface import kv_batch_put as kv_batch_put
    from transfer_queue.interface import kv_clear as kv_clear
    from transfer_queue.interface import kv_list as kv_list
    from transfer_queue.interface import kv_put as kv_put
    from transfer_queue.metadata import KVBatchMeta as KVBatchMeta
    from transfer_queue.storage.columns import Column as Column

_WHERE = {
    "transfer_queue.client": ("QueueClient", "SyncQueueClient"),
    "transfer_queue.cluster": ("LocalQueue", "QueueService"),
    "transfer_queue.metadata": ("KVBatchMeta",),
    "transfer_queue.storage.columns": ("Column",),
    "transfer_queue.interface": (
        "init", "close", "get_client",
        "kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta", "kv_list", "kv_clear",
        "async_kv_put", "async_kv_batch_put", "async_kv_batch_get", "async_kv_batch_get_by_meta", "async_kv_list",
        "async_kv_clear",
    ),
}  # fmt: skip

_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'transfer_queue' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
