"""transfer_queue: the queue between generation and training.

Use it as a key-value store (`init`, `kv_put`, `kv_batch_get`, ...), row by row with consuming tasks (`get_client`,
`StreamingDataLoader`), or through `QueueClient` with admission, leases and watches. Nothing heavy is imported before it
is used; torch and tensordict only when tensors are made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_queue.client import QueueClient as QueueClient
    from transfer_queue.client import SyncQueueClient as SyncQueueClient
    from transfer_queue.clients.batch_client import AsyncTransferQueueClient as AsyncTransferQueueClient
    from transfer_queue.clients.batch_client import TransferQueueClient as TransferQueueClient
    from transfer_queue.clients.parsers import register_data_parser as register_data_parser
    from transfer_queue.cluster import LocalQueue as LocalQueue
    from transfer_queue.cluster import QueueService as QueueService
    from transfer_queue.cluster import RayQueue as RayQueue
    from transfer_queue.dataloader import StreamingDataLoader as StreamingDataLoader
    from transfer_queue.dataloader import StreamingDataset as StreamingDataset
    from transfer_queue.errors import StorageKeyNotFoundError as StorageKeyNotFoundError
    from transfer_queue.interface import async_kv_batch_get as async_kv_batch_get
    from transfer_queue.interface import async_kv_batch_get_by_meta as async_kv_batch_get_by_meta
    from transfer_queue.interface import async_kv_batch_put as async_kv_batch_put
    from transfer_queue.interface import async_kv_clear as async_kv_clear
    from transfer_queue.interface import async_kv_list as async_kv_list
    from transfer_queue.interface import async_kv_put as async_kv_put
    from transfer_queue.interface import async_load_checkpoint as async_load_checkpoint
    from transfer_queue.interface import async_save_checkpoint as async_save_checkpoint
    from transfer_queue.interface import kv_batch_get as kv_batch_get
    from transfer_queue.interface import kv_batch_get_by_meta as kv_batch_get_by_meta
    from transfer_queue.interface import kv_batch_put as kv_batch_put
    from transfer_queue.interface import kv_clear as kv_clear
    from transfer_queue.interface import kv_list as kv_list
    from transfer_queue.interface import kv_put as kv_put
    from transfer_queue.interface import load_checkpoint as load_checkpoint
    from transfer_queue.interface import save_checkpoint as save_checkpoint
    from transfer_queue.metadata import BatchMeta as BatchMeta
    from transfer_queue.metadata import KVBatchMeta as KVBatchMeta
    from transfer_queue.net.messages import GroupSpec as GroupSpec
    from transfer_queue.net.messages import SessionClose as SessionClose
    from transfer_queue.net.messages import TaskSpec as TaskSpec
    from transfer_queue.operations.doctor import doctor as doctor
    from transfer_queue.sampler import BaseSampler as BaseSampler
    from transfer_queue.sampler import GRPOGroupNSampler as GRPOGroupNSampler
    from transfer_queue.sampler import PrioritySampler as PrioritySampler
    from transfer_queue.sampler import RankAwareSampler as RankAwareSampler
    from transfer_queue.sampler import SeqlenBalancedSampler as SeqlenBalancedSampler
    from transfer_queue.sampler import SequentialSampler as SequentialSampler
    from transfer_queue.sampler import WeightedSampler as WeightedSampler
    from transfer_queue.service.attached import close as close
    from transfer_queue.service.attached import get_client as get_client
    from transfer_queue.service.attached import get_metrics_endpoint as get_metrics_endpoint
    from transfer_queue.service.attached import init as init
    from transfer_queue.storage.columns import Column as Column

_WHERE = {
    "transfer_queue.operations.doctor": ("doctor",),
    "transfer_queue.client": ("QueueClient", "SyncQueueClient"),
    "transfer_queue.clients.batch_client": ("AsyncTransferQueueClient", "TransferQueueClient"),
    "transfer_queue.cluster": ("LocalQueue", "QueueService", "RayQueue"),
    "transfer_queue.dataloader": ("StreamingDataLoader", "StreamingDataset"),
    "transfer_queue.errors": ("StorageKeyNotFoundError",),
    "transfer_queue.metadata": ("BatchMeta", "KVBatchMeta"),
    "transfer_queue.net.messages": ("GroupSpec", "SessionClose", "TaskSpec"),
    "transfer_queue.clients.parsers": ("register_data_parser",),
    "transfer_queue.service.attached": ("init", "close", "get_client", "get_metrics_endpoint"),
    "transfer_queue.sampler": (
        "BaseSampler", "SequentialSampler", "GRPOGroupNSampler", "RankAwareSampler", "SeqlenBalancedSampler",
        "PrioritySampler", "WeightedSampler",
    ),
    "transfer_queue.storage.columns": ("Column",),
    "transfer_queue.interface": (
        "kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta", "kv_list", "kv_clear",
        "async_kv_put", "async_kv_batch_put", "async_kv_batch_get", "async_kv_batch_get_by_meta", "async_kv_list",
        "async_kv_clear", "save_checkpoint", "load_checkpoint", "async_save_checkpoint", "async_load_checkpoint",
    ),
}  # fmt: skip

_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'transfer_queue' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _version() -> str:
    """That of the distribution that this package is part of."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("streamrl")
    except PackageNotFoundError:
        return "0+source"
