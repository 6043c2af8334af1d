"""Memory as numpy arrays: mapped files, and results whose memory comes from the results that were freed before.

A fresh page costs several times the copy that fills it, so both are kept: a file that is pooled and granted again stays
mapped (storage/segments.py), and the memory of a freed result becomes that of the next one.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from transfer_queue.storage.idle import note_use

Empty = Callable[[Any, Any], np.ndarray]
"""(shape, dtype) -> an array that is not initialised: np.empty, or a pool's."""

MAX_IDLE = 512 << 20
"""Bytes of freed results that one process keeps."""

LEAST = 256 << 10
"""Bytes from which a result is worth keeping: the allocator keeps smaller ones itself."""

PAGE = 4096

SIZES_PER_DOUBLING = 8
"""Size classes: what is rounded up wastes at most an eighth, and batches of about the same size are of one class."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def whole_pages(nbytes: int) -> int:
    """So many bytes, and what is left of the last page."""
    return -(-nbytes // PAGE) * PAGE


def size_class(nbytes: int) -> int:
    """`nbytes` rounded up to one of eight sizes per doubling, each a multiple of a page."""
    step = max(PAGE, (1 << (max(1, nbytes) - 1).bit_length()) // (2 * SIZES_PER_DOUBLING))
    return -(-nbytes // step) * step


class _Memory:
    """Memory that numpy sees as uint8[nbytes]. Every array made of it keeps it alive; `__del__` gives it back."""

    def __init__(self, address: int, nbytes: int, *, readonly: bool) -> None:
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, readonly),
        }  # fmt: skip


class _Mapped(_Memory):
    def __init__(self, address: int, nbytes: int, keep: Any, *, readonly: bool) -> None:
        super().__init__(address, nbytes, readonly=readonly)
        self._place = address, nbytes
        self._keep = keep

    def __del__(self, munmap: Any = _libc.munmap) -> None:
        munmap(*self._place)


def map_file(
    fd: int, nbytes: int, *, write: bool = False, private: bool = False, populate: bool = False, keep: Any = None
) -> np.ndarray:
    """Map a file; it stays mapped as long as an array of it lives, and `keep` with it. Unlike mmap.mmap, this keeps no
    descriptor. `private`: writable, and what is written stays in this array. Raises OSError.
    """
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if write or private else 0)
    flags = (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | (mmap.MAP_POPULATE if populate else 0)
    address = _libc.mmap(None, nbytes, prot, flags, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {nbytes} bytes: {os.strerror(number)}")
    return np.asarray(_Mapped(address, nbytes, keep, readonly=not (write or private)))


class _Lent(_Memory):
    def __init__(self, pool: ResultPool, raw: np.ndarray) -> None:
        super().__init__(raw.ctypes.data, raw.nbytes, readonly=False)
        self._pool, self._raw = pool, raw

    def __del__(self) -> None:
        self._pool.give_back(self._raw)


class ResultPool:
    """Memory for results. Invariants:

    - A buffer is lent to one array at a time: it comes back when that array and all views and tensors of it are gone.
    - At most `max_idle` bytes lie here unused, and none once no result was asked for a while (see idle.py).

    Without locks, since memory comes back in any thread, also in the midst of `empty`: a deque's ends are atomic.
    """

    def __init__(self, max_idle: int = MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._keeping = False
        self._idle: dict[int, deque[np.ndarray]] = defaultdict(deque)

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        """np.empty, from memory that was used before if there is some."""
        dtype = np.dtype(dtype)
        shape = shape if isinstance(shape, tuple) else (shape,)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LEAST:
            return np.empty(shape, dtype)
        self._keeping = True
        note_use(self)
        size = size_class(nbytes)
        try:
            raw = self._idle[size].pop()
        except IndexError:
            raw = np.empty(size, np.uint8)
        return np.asarray(_Lent(self, raw))[:nbytes].view(dtype).reshape(shape)

    def give_back(self, raw: np.ndarray) -> None:
        if self._keeping and self.idle_bytes() + raw.nbytes <= self._max_idle:
            self._idle[raw.nbytes].append(raw)

    def idle_bytes(self) -> int:
        return sum(size * len(buffers) for size, buffers in list(self._idle.items()))

    def sweep(self) -> None:
        pass

    def release(self) -> None:
        """Let go of what lies here unused, and of what comes back before a result is asked again."""
        self._keeping = False
        for buffers in list(self._idle.values()):
            buffers.clear()


scratch = ResultPool()
"""For what is put together only to be copied into a segment."""
