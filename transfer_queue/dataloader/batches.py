"""How a batch is fetched, and how it is cut: the two functions that a StreamingDataset may be given others for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from transfer_queue.clients.batch_client import TransferQueueClient
from transfer_queue.clients.row_verbs import USUAL_WAIT
from transfer_queue.clients.tensordicts import jagged
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.convert import is_tensor


def default_fetch_batch_fn(
    tq_client: TransferQueueClient, data_fields: Sequence[str], batch_size: int, partition_id: str, task_name: str,
    sampling_config: Mapping[str, Any], batch_index: int, *, drained: bool = False,
) -> tuple[TensorDict | None, BatchMeta]:  # fmt: skip
    """Batch number `batch_index`, and its metadata; (None, empty) if the task has consumed all rows there are and
    `drained` asks for that. Waits for it in the controller; raises DeadlineExceeded after USUAL_WAIT seconds."""
    config = {**sampling_config, "partition_id": partition_id, "task_name": task_name, "batch_index": batch_index}
    meta = tq_client.get_meta(
        list(data_fields), batch_size, partition_id, "fetch", task_name, config, wait=USUAL_WAIT, drained=drained
    )
    return (tq_client.get_data(meta), meta) if meta.size else (None, meta)


def chunk_batch_fn(
    td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1
) -> Iterator[tuple[TensorDict, BatchMeta]]:
    """The batch in consecutive pieces of `micro_batch_size` rows, the last one perhaps of fewer. Raises ValueError."""
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={micro_batch_size}; expected at least 1")
    for start in range(0, len(td), micro_batch_size):
        end = min(start + micro_batch_size, len(td))
        yield _rows(td, start, end), batch_meta[start:end]


def _rows(td: TensorDict, start: int, end: int) -> TensorDict:
    fields = {name: _slice(value, start, end) for name, value in td.items()}
    return TensorDict(fields, batch_size=[end - start])  # pyright: ignore[reportArgumentType]


def _slice(value: Any, start: int, end: int) -> Any:
    """Jagged tensors know no slices of their rows."""
    if not (is_tensor(value) and value.is_nested):
        return value[start:end]
    if value.layout is not torch.jagged or value.lengths() is not None:
        return torch.nested.as_nested_tensor(list(value.unbind())[start:end], layout=value.layout)
    offsets = value.offsets()[start : end + 1]
    values = value.values()[int(offsets[0]) : int(offsets[-1])]
    return jagged(values, (offsets - offsets[0]).cpu().numpy())
