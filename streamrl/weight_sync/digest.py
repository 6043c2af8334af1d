"""A checksum of a model's weights that does not depend on their order or on who holds them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

_WORD = (1 << 64) - 1


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Of (Hugging Face name, full tensor) pairs, 16 hex digits: the sum of the xxh3_64 of every tensor with its name,
    dtype and shape, modulo 2^64. Two processes that hold the same file's tensors get the same one."""
    return f"{sum(tensor_digest(name, tensor) for name, tensor in tensors) & _WORD:016x}"


def tensor_digest(name: str, tensor: Tensor) -> int:
    """Of one of them; sums may be made of parts, in any order."""
    value = tensor.detach().to("cpu").contiguous()
    hashed = xxhash.xxh3_64(f"{name} {value.dtype} {tuple(value.shape)}".encode())
    hashed.update(memoryview(value.reshape(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return hashed.intdigest()
