"""The batches, from a seed: the TensorDict that is put, and the same bytes as plain arrays for memcpy."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from benchmarks.queue.names import keys_of, tag_of


@dataclass(frozen=True, slots=True)
class Batch:
    """`objects` are the values of the object columns; `buffers` the bytes of all columns."""

    keys: list[str]
    tags: list[dict[str, Any]]
    fields: TensorDict
    tensors: list[str]
    objects: dict[str, list[Any]]
    buffers: list[np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


def stack(values: list[Any]) -> NonTensorStack:
    """What tensordict makes of Python objects; its time is the floor of any get with object columns."""
    return NonTensorStack(*(NonTensorData(value) for value in values))


def dense_batch(rows: int, columns: int, width: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    arrays = {f"dense{i}": rng.random((rows, width), dtype=np.float32) for i in range(columns)}
    return _batch(rows, arrays, {}, {})


def complex_batch(rows: int, width: int, seed: int) -> Batch:
    """A third each of fixed rows, ragged rows and strings of hexadecimal digits."""
    rng, plain = np.random.default_rng(seed), random.Random(seed)
    arrays = {f"dense{i}": rng.random((rows, width), dtype=np.float32) for i in range(3)}
    ragged = {}
    for i in range(3):
        lengths = rng.integers(1, width + 1, rows)
        ragged[f"ragged{i}"] = (rng.random(int(lengths.sum()), dtype=np.float32), _offsets(lengths))
    objects = {f"string{i}": [plain.randbytes(2 * width).hex() for _ in range(rows)] for i in range(3)}
    return _batch(rows, arrays, ragged, objects)


def ragged_batch(rows: int, shortest: int, longest: int, seed: int, columns: int = 8) -> Batch:
    """Token columns (int64) and the four object columns of a trajectory: like what verl's agent loop puts."""
    rng = np.random.default_rng(seed)
    ragged = {}
    for i in range(columns):
        lengths = rng.integers(shortest, longest + 1, rows)
        ragged[f"tokens{i}"] = (rng.integers(0, 150_000, int(lengths.sum())), _offsets(lengths))
    objects = {
        "uid": [f"{i:032x}" for i in range(rows)],
        "raw_prompt": [[{"role": "user", "content": f"question {i}: what is {i} + {i}?"}] for i in range(rows)],
        "reward_model": [{"style": "rule", "ground_truth": str(2 * i)} for i in range(rows)],
        "extra_info": [{"index": i, "split": "train", "num_turns": 2} for i in range(rows)],
    }
    return _batch(rows, {}, ragged, objects)


def one_row(i: int) -> dict[str, Any]:
    return {"tokens": torch.arange(i, i + 16)}


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _batch(
    rows: int, arrays: dict[str, np.ndarray], ragged: dict[str, tuple[np.ndarray, np.ndarray]],
    objects: dict[str, list[Any]],
) -> Batch:  # fmt: skip
    columns: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for name, (values, offsets) in ragged.items():
        columns[name] = torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), torch.from_numpy(offsets))
    tensors = list(columns)
    columns |= {name: stack(values) for name, values in objects.items()}
    buffers = [*arrays.values(), *(values for values, _ in ragged.values())]
    texts = ["".join(map(str, values)).encode() for values in objects.values()]
    buffers += [np.frombuffer(text, np.uint8) for text in texts]
    fields = TensorDict(columns, batch_size=[rows])  # pyright: ignore
    return Batch(keys_of(rows), [tag_of(i) for i in range(rows)], fields, tensors, objects, buffers)
