"""`DataProto`: rows of tensors, rows of anything else, and values for all of them. For code written against it.

    data = DataProto.from_dict({"input_ids": ids}, {"uid": uids}, {"temperature": 0.7})
    padded, pad_size = pad_dataproto_to_divisor(data, group.world_size)
    answers = unpad_dataproto(group.generate_sequences(padded), pad_size)

Rows travel with it through the process that holds it; the trainer's own loop passes references instead (`KVBatchMeta`).
torch is imported by what makes or touches tensors, not by this module.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.single_controller.metrics import is_metrics, merge_metrics
from streamrl.single_controller.values import as_rows, row_index, same

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    Rows = int | slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor

METRICS = "metrics"
"""In `meta_info`: what ranks measured; merged when their results are joined, where any other value must agree."""


@dataclass(frozen=True)
class DataProtoItem:
    """One row."""

    batch: Any
    """TensorDict without batch dimension, or None."""
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass
class DataProto:
    """Invariant: `batch` has one batch dimension, and every array of `non_tensor_batch` as many rows (ValueError).

    Methods return a new DataProto whose tensors may share memory with this one's, unless they say "in place".
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raises ValueError when rows do not match, TypeError for what is no array."""
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise ValueError(f"batch has batch size {list(self.batch.batch_size)}; one dimension, the rows, is needed")
        for name, values in self.non_tensor_batch.items():
            if not isinstance(values, np.ndarray) or not values.ndim:
                raise TypeError(
                    f"non_tensor_batch[{name!r}] is {type(values).__name__}; a numpy array of rows is needed"
                )
            if len(values) != len(self):
                raise ValueError(f"non_tensor_batch[{name!r}] has {len(values)} rows, the others have {len(self)}")

    # --- making ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls, tensors: Mapping[str, torch.Tensor] | None = None, non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> DataProto:  # fmt: skip
        """`tensors[name]` is [rows, ...]; `non_tensors[name]` an array of rows, or a list: an object array then."""
        batch = None
        if tensors:
            import torch
            from tensordict import TensorDict

            for name, value in tensors.items():
                if not isinstance(value, torch.Tensor) or not value.ndim:
                    raise TypeError(f"tensors[{name!r}] is {type(value).__name__}; a tensor [rows, ...] is needed")
            sizes = {name: value.shape[0] for name, value in tensors.items()}
            if len(set(sizes.values())) != 1:
                raise ValueError(f"tensors differ in their number of rows: {sizes}")
            batch = TensorDict(dict(tensors), batch_size=[next(iter(sizes.values()))])
        others = {name: as_rows(values) for name, values in (non_tensors or {}).items()}
        return cls(batch, others, dict(meta_info or {}))

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None) -> DataProto:
        """Tensors and numpy arrays from one dict, as a collate function gives it."""
        tensors = {name: value for name, value in data.items() if hasattr(value, "is_nested")}
        others = {name: value for name, value in data.items() if isinstance(value, np.ndarray)}
        if unknown := set(data) - set(tensors) - set(others):
            kinds = {name: type(data[name]).__name__ for name in sorted(unknown)}
            raise TypeError(f"from_single_dict takes tensors and numpy arrays; got {kinds}")
        return cls.from_dict(tensors, others, meta_info)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str]) -> DataProto:
        """What `save_to_disk` wrote, on the CPU. Raises ValueError for another file; nothing in it is executed."""
        from streamrl.single_controller import saved

        return saved.load(filepath)

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Into one safetensors file. Raises TypeError naming what such a file cannot hold (any object of a class)."""
        from streamrl.single_controller import saved

        saved.save(self, filepath)

    # --- rows -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return next((len(values) for values in self.non_tensor_batch.values()), 0)

    def __getitem__(self, rows: Rows) -> Any:
        """An int gives a DataProtoItem; a slice, indexes or a mask a DataProto."""
        if isinstance(rows, slice):
            return self.slice(rows.start, rows.stop, rows.step)
        if isinstance(rows, int | np.integer) and not isinstance(rows, bool):
            if not -len(self) <= rows < len(self):
                raise IndexError(f"row {rows} of {len(self)}")
            values = {name: column[rows] for name, column in self.non_tensor_batch.items()}
            return DataProtoItem(None if self.batch is None else self.batch[int(rows)], values, dict(self.meta_info))
        return self.select_idxs(rows)  # type: ignore[arg-type]

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        return self.select_idxs(range(len(self))[start:end:step])

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor) -> DataProto:
        """Rows by index, in this order and as often as named, or by a mask with one entry per row."""
        index = row_index(idxs, len(self))
        batch = None
        if self.batch is not None:
            from streamrl.single_controller.tensordicts import take_rows

            batch = take_rows(self.batch, index.tolist())
        return DataProto(batch, {name: v[index] for name, v in self.non_tensor_batch.items()}, dict(self.meta_info))

    def reorder(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Another order of the rows, in place. Raises ValueError unless it is a permutation."""
        index = row_index(indices, len(self))
        if sorted(index.tolist()) != list(range(len(self))):
            raise ValueError(f"reorder: {index.tolist()[:8]}... is not a permutation of the {len(self)} rows")
        other = self.select_idxs(index)
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row so many times: a a b b, or a b a b without `interleave`."""
        if repeat_times < 1:
            raise ValueError(f"repeat: {repeat_times} times; at least 1 is needed")
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def split(self, split_size: int) -> list[DataProto]:
        """Consecutive pieces of `split_size` rows; the last may be shorter."""
        if split_size < 1:
            raise ValueError(f"split: pieces of {split_size} rows; at least 1 is needed")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """`chunks` pieces of one size. Raises ValueError where it does not divide: pad first."""
        if chunks < 1 or len(self) % chunks:
            raise ValueError(
                f"chunk: {len(self)} rows do not divide into {chunks} pieces of one size; see pad_dataproto_to_divisor"
            )
        size = len(self) // chunks
        return [self.slice(part * size, (part + 1) * size) for part in range(chunks)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """All rows. Fields must be the same and values of `meta_info` agree, but for `metrics`: dicts of `Metric` are
        merged to floats, other dicts become one of lists."""
        if not data:
            raise ValueError("concat: nothing to join")
        first, batch = data[0], None
        for part in data:
            if (part.batch is None) is not (first.batch is None) or part.non_tensor_batch.keys() != (
                first.non_tensor_batch.keys()
            ):
                raise ValueError(f"concat: fields differ: {first.fields()} and {part.fields()}")
        if first.batch is not None:
            from streamrl.single_controller.tensordicts import join_rows

            batch = join_rows([part.batch for part in data if part.batch is not None])
        others = {
            name: np.concatenate([part.non_tensor_batch[name] for part in data]) for name in first.non_tensor_batch
        }
        return DataProto(batch, others, _joined_meta([part.meta_info for part in data]))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches, `epochs` times; in another order each epoch with dataloader_kwargs={"shuffle": True}.

        Raises ValueError if the rows do not divide into mini-batches, before the first one.
        """
        options = dict(dataloader_kwargs or {})
        shuffle = bool(options.pop("shuffle", False))
        if options:
            raise ValueError(
                f"make_iterator knows dataloader_kwargs={{'shuffle': bool}} only; got also {sorted(options)}"
            )
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"make_iterator: {len(self)} rows do not divide into mini-batches of {mini_batch_size}")
        rng = np.random.default_rng(seed)

        def batches() -> Iterator[DataProto]:
            for _ in range(epochs):
                rows = rng.permutation(len(self)) if shuffle else np.arange(len(self))
                for start in range(0, len(self), mini_batch_size):
                    yield self.select_idxs(rows[start : start + mini_batch_size])

        return batches()

    # --- fields ---------------------------------------------------------------------------------------------------

    def fields(self) -> list[str]:
        """Names of tensors, then of the rest."""
        return [*(map(str, self.batch.keys()) if self.batch is not None else ()), *self.non_tensor_batch]

    def select(
        self, batch_keys: Sequence[str] | None = None, non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None, deepcopy: bool = False,
    ) -> DataProto:  # fmt: skip
        """These fields only; None keeps all of a kind. Raises KeyError for unknown ones."""
        self._known(batch_keys, non_tensor_batch_keys, meta_info_keys)
        batch = self.batch if self.batch is None or batch_keys is None else self.batch.select(*batch_keys)
        others = {name: self.non_tensor_batch[name] for name in _chosen(self.non_tensor_batch, non_tensor_batch_keys)}
        meta = {name: self.meta_info[name] for name in _chosen(self.meta_info, meta_info_keys)}
        chosen = DataProto(None if batch is None else batch.copy(), others, meta)
        if not deepcopy:
            return chosen
        return DataProto(None if batch is None else batch.clone(), copy.deepcopy(others), copy.deepcopy(meta))

    def pop(
        self, batch_keys: Sequence[str] = (), non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> DataProto:  # fmt: skip
        """Take these fields out, in place, and give them back as a DataProto."""
        self._known(batch_keys, non_tensor_batch_keys, meta_info_keys)
        taken = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        if self.batch is not None:
            self.batch = self.batch.exclude(*batch_keys)
            taken.batch = taken.batch if batch_keys else None
        for name in non_tensor_batch_keys:
            del self.non_tensor_batch[name]
        for name in meta_info_keys:
            del self.meta_info[name]
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Other names for tensors, in place."""
        old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys))
        if len(old) != len(new):
            raise ValueError(f"rename: {len(old)} old names and {len(new)} new ones")
        self._known(old)
        for before, after in zip(old, new, strict=True):
            assert self.batch is not None
            self.batch.rename_key_(before, after, safe=True)
        return self

    def union(self, other: DataProto) -> DataProto:
        """Take in the other's fields and values, in place. Raises ValueError where both have one and they differ, or
        if the rows are not as many. Of `metrics`, the other's are the newer ones."""
        if self.fields() and other.fields() and len(self) != len(other):
            raise ValueError(f"union: {len(self)} and {len(other)} rows")
        taken = dict(other.meta_info)
        if isinstance(mine := self.meta_info.get(METRICS), dict) and isinstance(taken.get(METRICS), dict):
            taken[METRICS] = mine | taken[METRICS]
        kinds = (
            (
                dict(self.batch.items()) if self.batch is not None else {},
                other.batch if other.batch is not None else {},
            ),
            (self.non_tensor_batch, other.non_tensor_batch),
            ({name: value for name, value in self.meta_info.items() if name != METRICS}, taken),
        )
        for mine, theirs in kinds:
            if differ := [name for name in theirs.keys() if name in mine and not same(mine[name], theirs[name])]:  # noqa: SIM118
                raise ValueError(f"union: both have {differ}, with other values; rename or pop them first")
        if self.batch is None:
            self.batch = None if other.batch is None else other.batch.copy()
        elif other.batch is not None:
            self.batch.update(other.batch)
        self.non_tensor_batch.update(other.non_tensor_batch)
        self.meta_info.update(taken)
        return self

    def to(self, device: str | torch.device) -> DataProto:
        """Tensors on this device, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def _known(self, *names: Sequence[str] | None) -> None:
        there = (self.batch.keys() if self.batch is not None else (), self.non_tensor_batch, self.meta_info)
        for kind, wanted, known in zip(("batch", "non_tensor_batch", "meta_info"), names, there, strict=False):
            if missing := [name for name in wanted or () if name not in known]:
                raise KeyError(f"{kind} has no {missing}; it has {sorted(map(str, known))}")


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """The first rows once more at the end, until `size_divisor` divides; and how many these are."""
    if size_divisor < 1:
        raise ValueError(f"pad_dataproto_to_divisor: size_divisor={size_divisor}; at least 1 is needed")
    pad_size = -len(data) % size_divisor
    return data.select_idxs([row % len(data) for row in range(len(data) + pad_size)]) if pad_size else data, pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Without the last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"unpad_dataproto: {pad_size} rows of padding in {len(data)} rows")
    return data.slice(0, len(data) - pad_size) if pad_size else data


def _chosen(there: Mapping[str, Any], keys: Sequence[str] | None) -> list[str]:
    return list(there if keys is None else keys)


def _joined_meta(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name != METRICS and not same(whole.setdefault(name, value), value):
                raise ValueError(
                    f"concat: meta_info[{name!r}] is {whole[name]!r} and {value!r}; what differs goes in metrics"
                )
    if measured := [part[METRICS] for part in parts if part.get(METRICS) is not None]:
        if all(map(is_metrics, measured)):
            whole[METRICS] = merge_metrics(measured)
        else:
            dicts = [one for many in measured for one in (many if isinstance(many, list) else [many])]
            whole[METRICS] = {name: [one[name] for one in dicts if name in one] for one in dicts for name in one}
    return whole
