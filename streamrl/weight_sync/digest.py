"""A checksum of a model's weights that does not depend on their order or on who holds them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor

from streamrl.weight_sync.protocol import WeightInfo, check_digest

_WORD = (1 << 64) - 1
_MOST_THREADS = 4
"""More do not read faster: memory is what limits them."""


def weights_digest(tensors: Iterable[tuple[str, Tensor]], threads: int = 1) -> str:
    """Of (Hugging Face name, full tensor) pairs, 16 hex digits: the sum of the xxh3_64 of every tensor with its name,
    dtype and shape, modulo 2^64. Two processes that hold the same file's tensors get the same one."""
    if threads == 1:
        return f"{sum(tensor_digest(name, tensor) for name, tensor in tensors) & _WORD:016x}"
    with ThreadPoolExecutor(threads) as pool:  # hashing lets other threads run
        return f"{sum(pool.map(tensor_digest, *zip(*tensors, strict=True))) & _WORD:016x}"


def checked_digest(tensors: Mapping[str, Tensor], info: WeightInfo) -> str:
    """Of what was read of `info`. Raises WeightsDamaged if it is not the trainer's."""
    found = weights_digest(tensors.items(), free_threads())
    check_digest(found, info)
    return found


def free_threads(processes: int = 1) -> int:
    """For reading and writing tensors of this process, where so many on this machine do it at the same time."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // processes))


def tensor_digest(name: str, tensor: Tensor) -> int:
    """Of one of them; sums may be made of parts, in any order."""
    value = tensor.detach().to("cpu").contiguous()
    hashed = xxhash.xxh3_64(f"{name} {value.dtype} {tuple(value.shape)}".encode())
    hashed.update(memoryview(value.reshape(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return hashed.intdigest()
