"""Which torch tensors can be stored, and what to put instead of the others. torch is never imported here."""

from __future__ import annotations

import sys
from typing import Any

TORCH_DTYPES = frozenset(
    [
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
        "uint8", "bool", "complex64", "complex128",
    ]
)  # fmt: skip


def why_not_storable(tensor: Any) -> str:
    """What is in the way of storing a tensor, with its remedy; "" if nothing is."""
    torch, name = sys.modules["torch"], str(tensor.dtype).removeprefix("torch.")
    if hasattr(tensor, "full_tensor"):
        return "is a DTensor, of which this process has a part; put `.full_tensor()` or `.to_local()`"
    if tensor.is_meta:
        return "is on the meta device, where tensors have no data; put one that has"
    if tensor.is_nested:
        return "is a nested tensor inside of a value; put its `.unbind()`"
    if tensor.layout is not torch.strided:
        return f"is a tensor of layout {tensor.layout}; put `.to_dense()`, or its indices and values as fields"
    if tensor.is_quantized:
        return f"is a quantised tensor ({name}); put `.dequantize()`, or `.int_repr()` with its scale"
    if tensor.is_conj():
        return "is a conjugate view; put `.resolve_conj()`"
    if tensor.is_neg():
        return "is a negated view; put `.resolve_neg()`"
    if name not in TORCH_DTYPES:
        as_bytes = "`.view(torch.uint8)` and view it back, or " if tensor.dtype.itemsize == 1 else ""
        return f"is a tensor of dtype {name}; put {as_bytes}`.to()` of a dtype of {', '.join(sorted(TORCH_DTYPES))}"
    return ""
