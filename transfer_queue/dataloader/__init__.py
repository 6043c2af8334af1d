"""Micro-batches as they become ready, for a training loop.

dataset = StreamingDataset(conf, batch_size=64, micro_batch_size=8, data_fields=["responses"], partition_id="train",
                           task_name="actor", dp_rank=0)
for tensordict, meta in StreamingDataLoader(dataset): ...
"""

from transfer_queue.dataloader.batches import chunk_batch_fn, default_fetch_batch_fn
from transfer_queue.dataloader.loader import StreamingDataLoader
from transfer_queue.dataloader.streaming import StreamingDataset

__all__ = ["StreamingDataLoader", "StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]
