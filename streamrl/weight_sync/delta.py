"""What changed between two versions of a tensor, bit by bit, in the smallest of three forms; no I/O.

    i:name + v:name    places (u32) and values        few changed
    b:name + v:name    one bit per number, and values more than one in 32 or so
    f:name             all values                     nearly all
    (nothing)          unchanged

In bfloat16 a step of a small learning rate changes some per cent of the numbers, in float32 nearly all of them.
Checksums are of the values after the change, so that a base that is not the writer's is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import xxhash
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDEX_BYTES = 4


def encode(name: str, old: Tensor, new: Tensor) -> dict[str, Tensor]:
    """From two flat tensors of one type and length. Raises ValueError."""
    if old.dtype != new.dtype or old.shape != new.shape or new.ndim != 1:
        raise ValueError(
            f"{name}: from {old.dtype} {tuple(old.shape)} to {new.dtype} {tuple(new.shape)}, must be alike"
        )
    width, count = new.element_size(), len(new)
    changed = _words(old) != _words(new)
    number = int(changed.sum())
    if not number:
        return {}
    sparse = number * (_INDEX_BYTES + width) if count < 1 << 32 else float("inf")
    bitmap = -(-count // 8) + number * width
    if count * width <= min(sparse, bitmap):
        return {f"f:{name}": new}
    if bitmap < sparse:
        return {f"b:{name}": torch.from_numpy(np.packbits(changed.numpy())), f"v:{name}": new[changed]}
    places = changed.nonzero().reshape(-1)
    return {f"i:{name}": places.to(torch.uint32), f"v:{name}": new[places]}


def changes(name: str, parts: Mapping[str, Tensor]) -> bool:
    return any(f"{form}:{name}" in parts for form in "ibf")


def apply(name: str, flat: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Change `flat`, in place, as `parts` say. Raises ValueError for parts that do not fit it; then it may be half
    changed."""
    if (whole := parts.get(f"f:{name}")) is not None:
        _same(name, flat, whole, len(flat))
        flat.copy_(whole)
        return
    if (places := parts.get(f"i:{name}")) is not None:
        where = places.to(torch.int64)
        if places.dtype != torch.uint32 or (len(where) and int(where.max()) >= len(flat)):
            raise ValueError(f"{name}: places beyond its {len(flat)} numbers")
    elif (bits := parts.get(f"b:{name}")) is not None:
        if bits.dtype != torch.uint8 or len(bits) != -(-len(flat) // 8):
            raise ValueError(f"{name}: {len(bits)} bytes of bits for {len(flat)} numbers")
        where = torch.from_numpy(np.flatnonzero(np.unpackbits(bits.numpy(), count=len(flat))))
    else:
        return
    values = parts.get(f"v:{name}")
    if values is None:
        raise ValueError(f"{name}: places without values")
    _same(name, flat, values, len(where))
    flat[where.to(flat.device)] = values.to(flat.device)


def checksum(flat: Tensor) -> str:
    """xxh3_64 of the bytes, 16 hex digits."""
    return xxhash.xxh3_64(flat.detach().to("cpu").contiguous().view(torch.uint8).numpy().data).hexdigest()


def _words(flat: Tensor) -> Tensor:
    return flat.view(_WORDS[flat.element_size()])


def _same(name: str, flat: Tensor, given: Tensor, count: int) -> None:
    if given.dtype != flat.dtype or given.ndim != 1 or len(given) != count:
        raise ValueError(f"{name}: {given.dtype} {tuple(given.shape)} given, {flat.dtype} ({count},) expected")
