"""What a call can split by rank, as one thing: references (`KVBatchMeta`), rows (`DataProto`, `TensorDict`), or both
(`HeldRows`).

Nothing here imports torch: a value can only be a TensorDict if something else has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from streamrl.single_controller import dispatch
from streamrl.single_controller.data_proto import DataProto
from transfer_queue.metadata import KVBatchMeta

if TYPE_CHECKING:
    from tensordict import TensorDict

    Batch: TypeAlias = "DataProto | KVBatchMeta | TensorDict | HeldRows"


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows with references to them, one for one: split as references are, into shares that may differ in size, so that
    no row is there twice."""

    references: KVBatchMeta
    rows: DataProto

    def __len__(self) -> int:
        return len(self.references)


def is_batch(value: Any) -> TypeGuard[Batch]:
    return isinstance(value, DataProto | KVBatchMeta | HeldRows) or is_tensordict(value)


def references_of(batch: Batch) -> KVBatchMeta | None:
    if isinstance(batch, HeldRows):
        return batch.references
    return batch if isinstance(batch, KVBatchMeta) else None


def is_tensordict(value: Any) -> TypeGuard[TensorDict]:
    return hasattr(value, "batch_size") and hasattr(value, "keys")


def cut(batch: Batch, rows: Sequence[Sequence[int]]) -> list[Batch]:
    """One batch per list of rows; a row may be in several."""
    if isinstance(batch, KVBatchMeta):
        return list(dispatch.shares_of(batch, rows))
    if isinstance(batch, HeldRows):
        shares = zip(dispatch.shares_of(batch.references, rows), rows, strict=True)
        return [HeldRows(share, take(batch.rows, chosen)) for share, chosen in shares]
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
