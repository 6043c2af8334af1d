"""Where each tensor lies in a safetensors file, known before anything is written: so many processes can fill one file.

    u64 length of header | header JSON, padded with spaces | tensors, one after the other

https://huggingface.co/docs/safetensors; tensors are ordered by falling width of their numbers, then by name, and the
first one starts at a multiple of 64 bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ALIGNMENT = 64
MAX_HEADER = 100_000_000
"""Bytes, as of the reference implementation."""

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "U32": 4,
          "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
"""Bytes of one number, by safetensors' name of the type."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A full tensor: its type by safetensors' name, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numbers * WIDTHS[self.dtype]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Invariant: the tensors fill the file behind its header without gaps or overlaps."""

    header: bytes
    offsets: Mapping[str, int]
    """Of the first byte of each tensor, from the start of the file."""
    size: int

    @classmethod
    def of(cls, entries: Iterable[Entry], metadata: Mapping[str, str]) -> FileLayout:
        """Raises ValueError for no tensor at all, or two of one name."""
        ordered = sorted(entries, key=lambda entry: (-WIDTHS[entry.dtype], entry.name))
        if not ordered:
            raise ValueError("no tensors to publish: the state is empty")
        table: dict[str, object] = {"__metadata__": dict(metadata)}
        starts: dict[str, int] = {}
        at = 0
        for entry in ordered:
            if entry.name in starts:
                raise ValueError(f"two tensors are called {entry.name}")
            starts[entry.name] = at
            table[entry.name] = {
                "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, at + entry.nbytes]
            }  # fmt: skip
            at += entry.nbytes
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        return cls(header, {name: len(header) + start for name, start in starts.items()}, len(header) + at)


def parse(header: bytes, room: int) -> list[tuple[Entry, int]]:
    """The tensors that a header names, each with its offset in the `room` bytes behind it. Raises ValueError unless
    they fill it without gaps or overlaps."""
    table = _object(header)
    table.pop("__metadata__", None)
    found: list[tuple[Entry, int]] = []
    for name, fields in table.items():
        match fields:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
                pass
            case _:
                raise ValueError(f"{name}: no dtype, shape and data_offsets")
        if dtype not in WIDTHS or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name}: {dtype} of shape {shape}")
        entry = Entry(name, dtype, tuple(shape))
        if end - start != entry.nbytes:
            raise ValueError(f"{name}: {end - start} bytes for {dtype} of shape {shape}")
        found.append((entry, start))
    found.sort(key=lambda pair: (pair[1], pair[0].nbytes))
    at = 0
    for entry, start in found:
        if start != at:
            raise ValueError(f"{entry.name} lies at {start}, not at {at}")
        at += entry.nbytes
    if not found:
        raise ValueError("it holds no tensors")
    if at != room:
        raise ValueError(f"{at} bytes of tensors in a file with room for {room}")
    return found


def metadata(header: bytes) -> dict[str, str]:
    """What stands beside the tensors. Raises ValueError."""
    given = _object(header).get("__metadata__", {})
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise ValueError("its metadata are no strings")
    return given


def _object(header: bytes) -> dict[str, Any]:
    try:
        table = json.loads(header) if header else None
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    if not isinstance(table, dict):
        raise ValueError("its header is no JSON object")
    return table
