"""The sides of a comparison, with the same verbs. Both queues are the module `transfer_queue` of their environment."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.queue.data import Batch, stack


class Queue:
    """The key-value verbs of whichever `transfer_queue` is importable here."""

    def __init__(self, name: str, init_seconds: float) -> None:
        import transfer_queue as tq

        self.name = name
        self.init_seconds = init_seconds
        self.tq: Any = tq
        self.loaded: set[str] = set()  # partitions that a workload has filled once for all its rounds

    def put(self, batch: Batch, partition: str) -> None:
        self.tq.kv_batch_put(batch.keys, partition, fields=batch.fields, tags=batch.tags)

    def get(self, batch: Batch, partition: str, keys: list[str], fields: list[str] | None) -> Any:
        return self.tq.kv_batch_get(keys, partition, select_fields=fields)

    def clear(self, keys: list[str], partition: str) -> None:
        self.tq.kv_clear(keys, partition)


class Ours(Queue):
    """This package as it runs on one node: controller and two storage units as processes, the client in this one."""

    def __init__(self) -> None:
        import transfer_queue.interface as tq

        self._directory = tempfile.TemporaryDirectory(prefix="tq-bench-")
        began = time.perf_counter()
        conf: Any = tq.init({"directory": self._directory.name, "units": 2})
        super().__init__("ours", time.perf_counter() - began)
        self.address: dict[str, str] = conf["address"]

    def view(self, batch: Batch, partition: str, keys: list[str], fields: list[str] | None) -> Any:
        """`get` without a copy; the peer has no such verb."""
        return self.tq.kv_batch_get(keys, partition, select_fields=fields, copy=False)

    def close(self) -> None:
        self.tq.close()
        self._directory.cleanup()


class Memcpy:
    """The least that could be done: put copies into memory that was written before, get allocates and copies."""

    name = "memcpy"

    def __init__(self) -> None:
        self._pool: list[np.ndarray] = []

    def put(self, batch: Batch, partition: str) -> None:
        if [a.nbytes for a in self._pool] != [b.nbytes for b in batch.buffers]:
            self._pool = [np.ones_like(buffer) for buffer in batch.buffers]
        for target, buffer in zip(self._pool, batch.buffers, strict=True):
            np.copyto(target, buffer)

    def get(self, batch: Batch, partition: str, keys: list[str], fields: list[str] | None) -> Any:
        """With all fields, wrapping the objects is included: no TensorDict does without."""
        copies = [buffer.copy() for buffer in batch.buffers]
        return copies if fields is not None else (copies, [stack(values) for values in batch.objects.values()])

    def clear(self, keys: list[str], partition: str) -> None:
        pass

    def close(self) -> None:
        self._pool.clear()
