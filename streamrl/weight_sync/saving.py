"""Tensors into a safetensors file, synced; and what is said where that cannot be done."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.weight_sync.layout import Entry, FileLayout
from streamrl.weight_sync.mapped import torch_types
from streamrl.weight_sync.protocol import WeightsNotWritten

if TYPE_CHECKING:
    from torch import Tensor


def save(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """A new file, for this user alone. Raises OSError, ValueError (a type that cannot be published)."""
    entries = [Entry(name, safetensors_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()]
    layout = FileLayout.of(entries, metadata)
    make(path, layout)
    handle = os.open(path, os.O_WRONLY)
    try:
        for name, tensor in tensors.items():
            pwrite(handle, as_bytes(tensor.contiguous()), layout.offsets[name])
        os.fsync(handle)
    finally:
        os.close(handle)


def make(path: Path, layout: FileLayout) -> None:
    """With its header, and room for the tensors. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.ftruncate(handle, layout.size)
        pwrite(handle, memoryview(layout.header), 0)
        now = time.time_ns()
        os.utime(handle, ns=(now, now))
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """A file or directory is on its disk, if it lies on one."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def pwrite(handle: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written


def safetensors_name(tensor: Tensor) -> str:
    """Of a tensor's type. Raises ValueError."""
    for name, dtype in torch_types().items():
        if dtype == tensor.dtype:
            return name
    raise ValueError(f"weights of type {tensor.dtype} cannot be published; known are {', '.join(torch_types())}")


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU; not copied."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def not_written(version: int, directory: Path, error: OSError) -> WeightsNotWritten:
    """In its place."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return WeightsNotWritten(
            f"no room for version {version} of the weights in {directory}: {error}; free some or choose another"
        )
    return WeightsNotWritten(f"version {version} of the weights cannot be written to {directory}: {error}")
