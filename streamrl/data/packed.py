"""Prompt rows one after the other in a file, and an index of where each begins: any row by one read.

    row 0 | row 1 | row 2, too long | row 3 | ... | row 2, cut       bytes of encode_object
    starts  i64 per row                                              what is in memory: 16 bytes a row

A global shuffle asks for rows in any order, and a parquet file can only give a row by decoding its whole row group. So
rows are copied once, as they are checked at the start, into the form in which they are asked.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from streamrl.data.formats import Place
from streamrl.errors import DatasetError
from transfer_queue.storage.objects import decode_object, encode_object

IN_MEMORY = 64 << 20
"""Bytes; up to these a copy on disk would only cost time."""


def cache_directory() -> Path:
    """Of this user, on a disk of this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "streamrl"


class PackedRows(Sequence[dict[str, Any]]):
    """Append-only. Beyond `in_memory` bytes the rows move to a file without a name in `cache_directory`, which ends
    with the process, however that ends; the page cache of the system is what holds rows that were just read."""

    def __init__(self, in_memory: int | None = None) -> None:
        self._in_memory = IN_MEMORY if in_memory is None else in_memory
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._written = True
        self._end = 0
        self._starts, self._sizes = array("q"), array("q")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]  # no slices of what is not in memory
        start, size = self._starts[index], self._sizes[index]
        if self._file is None:
            return decode_object(bytes(self._memory[start : start + size]))
        if not self._written:
            self._file.flush()
            self._written = True
        return decode_object(os.pread(self._file.fileno(), size, start))

    def append(self, row: dict[str, Any], place: Place) -> None:
        """Raises DatasetError for values that the queue cannot carry (dates, decoded images) and for a full disk."""
        start, size = self._write(row, place)
        self._starts.append(start)
        self._sizes.append(size)

    def replace(self, index: int, row: dict[str, Any], place: Place) -> None:
        """As `append`, in the place of another row, whose bytes stay behind."""
        self._starts[index], self._sizes[index] = self._write(row, place)

    def drop(self, indices: Sequence[int]) -> None:
        """These rows are none; those behind them move up."""
        for name in ("_starts", "_sizes"):
            kept = np.delete(np.frombuffer(getattr(self, name), dtype=np.int64), np.asarray(indices, dtype=np.int64))
            setattr(self, name, array("q", kept.tobytes()))

    def _write(self, row: dict[str, Any], place: Place) -> tuple[int, int]:
        try:
            encoded = encode_object(row, field="row")
        except TypeError as error:
            raise DatasetError(f"{place}: {error}") from error
        start, self._end = self._end, self._end + len(encoded)
        try:
            self._put(encoded)
        except OSError as error:
            raise DatasetError(
                f"{place}: the rows are more than {self._in_memory >> 20} MiB and cannot be written to "
                f"{cache_directory()}: {error.strerror}; let XDG_CACHE_HOME name a directory with room for them, or "
                "lower data.train_max_samples"
            ) from error
        return start, len(encoded)

    def _put(self, encoded: bytes) -> None:
        if self._file is None and self._end > self._in_memory:
            directory = cache_directory()
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, buffering=1 << 20)  # noqa: SIM115 (as long as the rows)
            self._file.write(self._memory)
            self._memory = bytearray()
        if self._file is None:
            self._memory += encoded
        else:
            self._file.write(encoded)
            self._written = False
