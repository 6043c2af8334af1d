"""Functions that tests call on ranks by name."""

from __future__ import annotations

from streamrl.single_controller import Worker
from transfer_queue.metadata import KVBatchMeta

NO_FUNCTION = 3


def keys_of(worker: Worker, batch: KVBatchMeta) -> list[str]:
    return batch.keys
