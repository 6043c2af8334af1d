"""A safetensors file as tensors that lie in it: mapped, and not written again while anybody has them."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from typing import TYPE_CHECKING

from streamrl.weight_sync.layout import MAX_HEADER, Entry, parse
from streamrl.weight_sync.protocol import WeightsDamaged, WeightsMissing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GONE = "{} is not there (the last two versions are kept); load what LATEST names"


def map_tensors(path: str) -> dict[str, Tensor]:
    """The tensors of a file, mapped privately: nothing is copied until it is touched, and what is changed here changes
    here alone. The mapping holds a shared lock on the file, which goes with the last tensor, so that its pages are not
    taken for another version before (`recyclable`).

    Raises WeightsMissing, WeightsDamaged (bad header, truncated, empty).
    """
    handle, entries, size = opened(path)
    try:
        return views(mmap.mmap(handle, size, access=mmap.ACCESS_COPY), entries)  # shares the lock with `handle`
    finally:
        os.close(handle)


def opened(path: str) -> tuple[int, list[tuple[Entry, int]], int]:
    """A file, with a shared lock on it: its handle, its tensors and where each begins, its size. Raises as
    `map_tensors`."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is not waited for
    except (FileNotFoundError, NotADirectoryError) as error:
        raise WeightsMissing(GONE.format(path)) from error
    except (OSError, ValueError) as error:
        raise WeightsDamaged(f"{path[:200]!r} cannot be opened ({error}); publish again") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if not os.path.exists(path) or os.stat(path).st_ino != found.st_ino:
            raise WeightsMissing(GONE.format(path))
        length = int.from_bytes(os.pread(handle, 8, 0), "little")
        header = os.pread(handle, length, 8) if length <= MAX_HEADER else b""
        entries = parse(header, found.st_size - 8 - length)
    except BaseException as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise WeightsMissing(GONE.format(path)) from error
        if isinstance(error, (OSError, ValueError)) and not isinstance(error, WeightsMissing):
            raise WeightsDamaged(f"{path} is no whole safetensors file ({error}); publish again") from error
        raise
    return handle, [(entry, 8 + length + start) for entry, start in entries], found.st_size


def views(memory: mmap.mmap, entries: list[tuple[Entry, int]]) -> dict[str, Tensor]:
    """They hold `memory`. Raises WeightsDamaged."""
    import torch

    types = torch_types()
    try:
        return {
            entry.name: torch.frombuffer(memory, dtype=types[entry.dtype], count=entry.numbers, offset=start).view(
                entry.shape
            )
            if entry.nbytes
            else torch.empty(entry.shape, dtype=types[entry.dtype])
            for entry, start in entries
        }
    except (RuntimeError, TypeError, OverflowError) as error:  # a shape with a 0 and a number beyond 2^63
        raise WeightsDamaged(f"tensors of shapes that cannot be: {error}; publish again") from error


def recyclable(path: str | os.PathLike[str], name: str | os.PathLike[str]) -> bool:
    """Whether nobody has a file mapped; then it is called `name` now, and whoever has just opened it leaves it."""
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(path, name)
    except OSError:  # BlockingIOError: it is mapped. Else it can be made anew as well
        return False
    finally:
        os.close(handle)
    return True


def torch_types() -> dict[str, torch.dtype]:
    """By safetensors' names."""
    import torch

    return {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
        "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U32": torch.uint32,
    }  # fmt: skip
