"""A dataset of batches that are fetched when the iteration comes to them.

consumes     rows of a partition that have all `data_fields`, as one task
produces     (TensorDict, BatchMeta) micro-batches
waits for    its next batch, in the controller; it never polls
woken by     the put that makes the batch complete, or the task's last row, if it looks for that
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tensordict import TensorDict
from torch.utils.data import IterableDataset

from transfer_queue.dataloader.batches import chunk_batch_fn, default_fetch_batch_fn
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.metadata import BatchMeta
from transfer_queue.service.attached import get_client, init

log = logging.getLogger(__name__)

MicroBatch = tuple[TensorDict, BatchMeta]


class StreamingDataset(IterableDataset[MicroBatch]):
    """See the module. It keeps every batch it has fetched in `buffer`, so that `reset` can go through them again, until
    `step`: the memory of a step is that of its batches."""

    def __init__(
        self, config: Mapping[str, Any] | None, batch_size: int, micro_batch_size: int, data_fields: Sequence[str],
        partition_id: str, task_name: str, dp_rank: int, should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., tuple[TensorDict | None, BatchMeta | None]] | None = None,
        process_batch_fn: Callable[[TensorDict, BatchMeta, int], Iterator[MicroBatch]] | None = None,
    ) -> None:  # fmt: skip
        """`config` is what `init` takes or returned; a queue that is there already is attached to. `dp_rank`, with the
        number of the batch, is what RankAwareSampler and SeqlenBalancedSampler go by.

        With `should_check_consumption_status` the iteration ends when the task has consumed all rows; else it goes on
        waiting for more. Raises ValueError for sizes below 1.
        """
        if batch_size < 1 or micro_batch_size < 1:
            raise ValueError(f"batch_size={batch_size}, micro_batch_size={micro_batch_size}; both must be at least 1")
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = list(data_fields)
        self.partition_id = partition_id
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.buffer: list[MicroBatch] = []
        self.batch_index = 0
        """Batches of this step that the iteration has come to."""

    def __iter__(self) -> Iterator[MicroBatch]:
        while True:
            if self.batch_index == len(self.buffer):
                batch = self._fetch()
                if batch is None:
                    return
                self.buffer.append(batch)
            self.batch_index += 1
            yield from self.process_batch_fn(*self.buffer[self.batch_index - 1], self.micro_batch_size)

    def reset(self) -> None:
        """Begin again with the first batch of this step."""
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Let go of all batches and go on with this partition."""
        self.buffer.clear()
        self.batch_index = 0
        self.partition_id = partition_id

    def _fetch(self) -> MicroBatch | None:
        """The next batch; None if the task has consumed all rows, and that is looked for."""
        init(self.config)
        client = get_client()
        extra = (
            {"drained": self.should_check_consumption_status} if self.fetch_batch_fn is default_fetch_batch_fn else {}
        )
        while True:
            try:
                td, meta = self.fetch_batch_fn(
                    client, self.data_fields, self.batch_size, self.partition_id, self.task_name,
                    {"dp_rank": self.dp_rank}, self.batch_index, **extra,
                )  # fmt: skip
            except DeadlineExceeded as error:
                log.warning("still waiting for batch %d of %r: %s", self.batch_index, self.partition_id, error)
                continue
            if td is not None and meta is not None and meta.size:
                return td, meta
            if self.should_check_consumption_status and (
                extra or client.check_consumption_status(self.task_name, self.partition_id)
            ):
                return None
