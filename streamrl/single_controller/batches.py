"""What a call can split by rank, as one thing: references (`KVBatchMeta`), or rows (`DataProto`, `TensorDict`).

Nothing here imports torch: a value can only be a TensorDict if something else has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from streamrl.single_controller import dispatch
from streamrl.single_controller.data_proto import DataProto
from transfer_queue.metadata import KVBatchMeta

if TYPE_CHECKING:
    from tensordict import TensorDict

    Batch: TypeAlias = DataProto | KVBatchMeta | TensorDict


def is_batch(value: Any) -> TypeGuard[Batch]:
    return isinstance(value, DataProto | KVBatchMeta) or is_tensordict(value)


def is_tensordict(value: Any) -> TypeGuard[TensorDict]:
    return hasattr(value, "batch_size") and hasattr(value, "keys")


def cut(batch: Batch, rows: Sequence[Sequence[int]]) -> list[Batch]:
    """One batch per list of rows; a row may be in several."""
    if isinstance(batch, KVBatchMeta):
        return list(dispatch.shares_of(batch, rows))
    return [take(batch, chosen) for chosen in rows]


def take(batch: Any, rows: Sequence[int]) -> Any:
    """These rows, in this order."""
    if isinstance(batch, KVBatchMeta):
        return batch.select_keys([batch.keys[i] for i in rows])
    if isinstance(batch, DataProto):
        return batch.select_idxs(rows)
    from streamrl.single_controller.tensordicts import take_rows

    return take_rows(batch, rows)


def join(batches: Sequence[Any]) -> Any:
    """All rows, in order. Raises TypeError for batches of different kinds, ValueError if they do not fit together."""
    if all(isinstance(batch, KVBatchMeta) for batch in batches):
        return dispatch.joined(batches)
    if all(isinstance(batch, DataProto) for batch in batches):
        return DataProto.concat(batches)
    if all(map(is_tensordict, batches)):
        from streamrl.single_controller.tensordicts import join_rows

        return join_rows(batches)
    raise TypeError(f"results of different kinds: {', '.join(type(batch).__name__ for batch in batches)}")
