"""Rows of any kind: making, indexing and comparing them. Imports no torch; knows a tensor by its attributes."""

from __future__ import annotations

from typing import Any

import numpy as np


def same(a: Any, b: Any) -> bool:
    """Equality that tensors and arrays answer too: of shape, type and every element (NaN equals NaN)."""
    if hasattr(a, "is_nested") or hasattr(b, "is_nested"):
        import torch

        if a is b:
            return True
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.layout != b.layout:
            return False
        if a.is_nested or b.is_nested:
            rows = a.unbind(), b.unbind()
            kinds = (a.is_nested, a.dtype, len(rows[0])) == (b.is_nested, b.dtype, len(rows[1]))
            return kinds and all(same(x, y) for x, y in zip(*rows, strict=True))
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.allclose(a, b, 0.0, 0.0, equal_nan=True))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray) or a.shape != b.shape:
            return False
        if a.dtype == object or b.dtype == object:
            return all(same(x, y) for x, y in zip(a.flat, b.flat, strict=True))
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc"))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[name]) for name, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and a != a and b != b)


def as_rows(values: Any) -> np.ndarray:
    """An array as it is; anything else as an object array of its rows, which may be lists or dicts."""
    if isinstance(values, np.ndarray):
        return values
    if not isinstance(values, list | tuple):
        raise TypeError(f"non-tensor values are a numpy array or a list of rows, not {type(values).__name__}")
    rows = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        rows[i] = value
    return rows


def row_index(idxs: Any, size: int) -> np.ndarray:
    """i64[rows] from indexes or a mask."""
    index = np.asarray(idxs.detach().cpu() if hasattr(idxs, "is_nested") else idxs)
    if index.ndim != 1:
        raise IndexError(f"rows are selected by a list of indexes or a mask, not by an array of shape {index.shape}")
    if index.dtype == bool:
        if len(index) != size:
            raise IndexError(f"a mask of {len(index)} entries for {size} rows")
        return np.flatnonzero(index)
    if index.size and index.dtype.kind not in "iu":
        raise IndexError(f"rows are selected by integers or booleans, not by {index.dtype}")
    index = index.astype(np.int64)
    if outside := index[(index < -size) | (index >= size)].tolist():
        raise IndexError(f"rows {outside[:5]} of {size}")
    return index % size if size else index
