"""Files of weights that stay mapped: a version is written over an older one, and both sides know its pages already.

To map a file anew costs more than to read it: a page fault for every few pages, 50 ms for 270 MB. To write through a
mapping costs half of what `write` does, and several threads may.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamrl.weight_sync.mapped import opened, views

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Kept:
    handle: int
    memory: mmap.mmap
    size: int

    @property
    def is_gone(self) -> bool:
        return not os.fstat(self.handle).st_nlink


class KeptPages:
    """Of the writer, in shared memory. Nothing is kept of a file that is gone, from the next call on."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _Kept] = {}

    def of(self, handle: int, size: int) -> mmap.mmap | None:
        """All bytes of a file open for reading and writing, if it has `size` and all of its pages. None: to write
        through a mapping might end the process, where there is no room for more of them."""
        for key in [key for key, kept in self._kept.items() if kept.is_gone]:
            os.close(self._kept.pop(key).handle)
        found = os.fstat(handle)
        if found.st_size != size or found.st_blocks * 512 < size:
            return None
        kept = self._kept.get(key := (found.st_dev, found.st_ino))
        if kept is not None and kept.size == size:
            return kept.memory
        if kept is not None:
            os.close(self._kept.pop(key).handle)
        kept = self._kept[key] = _Kept(os.dup(handle), mmap.mmap(handle, size), size)
        return kept.memory

    def close(self) -> None:
        for kept in self._kept.values():
            os.close(kept.handle)
        self._kept.clear()


class KeptMaps:
    """Of a reader. One file at a time is open; its tensors are those of `map_tensors`, until `release` or the next
    `open`.

    Invariants: the open file has a shared lock, others have none; what is kept of a file that is gone is given up with
    the next `open`. Whoever changes the numbers of a tensor (here alone, as the mapping is private) must `forget`:
    else those pages are not the file's any more.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._open: int | None = None

    def open(self, path: str) -> dict[str, Tensor]:
        """Raises WeightsMissing, WeightsDamaged (bad header, truncated, empty)."""
        self.release()
        self._drop_those_gone()
        handle, entries, size = opened(path)
        found = os.fstat(handle)
        key = found.st_dev, found.st_ino
        kept = self._kept.get(key)
        if kept is not None and kept.size == size:
            self._open = handle
            return views(kept.memory, entries)
        if kept is not None:
            self._drop(key)
        memory = mmap.mmap(handle, size, access=mmap.ACCESS_COPY)
        self._kept[key], self._open = _Kept(handle, memory, size), handle
        return views(memory, entries)

    def release(self) -> None:
        """The tensors are not read any more; the file may be written over."""
        handle, self._open = self._open, None
        if handle is None:
            return
        fcntl.flock(handle, fcntl.LOCK_UN)  # a mapping that was made with it would hold it
        if all(handle != kept.handle for kept in self._kept.values()):
            os.close(handle)

    def forget(self) -> None:
        """Map everything anew from now on."""
        self.release()
        for key in list(self._kept):
            self._drop(key)

    def _drop_those_gone(self) -> None:
        for key, kept in list(self._kept.items()):
            if kept.is_gone:
                self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        os.close(self._kept.pop(key).handle)
