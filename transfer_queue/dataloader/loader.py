"""torch's DataLoader around a StreamingDataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from transfer_queue.dataloader.streaming import MicroBatch, StreamingDataset


class StreamingDataLoader(DataLoader[Any]):
    """Yields what its dataset yields. With workers each of them attaches to the queue and fetches batches of its own;
    `reset`, `step` and `get_buffer` then reach the dataset of this process only, so use them with `num_workers=0`."""

    def __init__(
        self, dataset: StreamingDataset, num_workers: int = 0, collate_fn: Callable[[MicroBatch], Any] | None = None,
        pin_memory: bool = False, worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None, prefetch_factor: int | None = None, persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:  # fmt: skip
        """As torch's DataLoader; the dataset makes the batches. Raises TypeError for another kind of dataset."""
        if not isinstance(dataset, StreamingDataset):
            raise TypeError(f"StreamingDataLoader needs a StreamingDataset, got a {type(dataset).__qualname__}")
        options: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate_fn or _as_it_is,
            "pin_memory": pin_memory,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        if pin_memory_device:
            options["pin_memory_device"] = pin_memory_device
        super().__init__(dataset, batch_size=None, **options)
        self._streaming = dataset

    def reset(self) -> None:
        """See StreamingDataset.reset."""
        self._streaming.reset()

    def step(self, partition_id: str) -> None:
        """See StreamingDataset.step."""
        self._streaming.step(partition_id)

    def get_buffer(self) -> list[MicroBatch]:
        """The batches fetched in this step."""
        return self._streaming.buffer


def _as_it_is(batch: MicroBatch) -> MicroBatch:
    return batch
