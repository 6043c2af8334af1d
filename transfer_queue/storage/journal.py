"""The controller's journal: an append-only file of accepted mutations, whose replay gives the ledger again.

    file    magic(8 bytes: "TQJOURN" and the format version) then records
    record  length u32 | guard u32 | digest u64 | payload[length]

All integers are little-endian. `payload` is the msgpack form of `Record`, `digest` its xxh3-64, and `guard` the
xxh32 of the four length bytes, so that a damaged length is never taken for the end of the file. The first record, and
the first of every later life of the controller, is a `Life` with format version, run id and epoch. Sequence numbers are
consecutive from 1.

What may be missing: a process that is killed leaves at most one incomplete record at the end (torn, cut off when the
file is opened again); nobody got an answer for it. Any other difference is damage, and opening raises Corrupt.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from transfer_queue.errors import Corrupt
from transfer_queue.net.messages import Life, Record

FORMAT = 1

MAGIC = b"TQJOURN" + bytes([FORMAT])

MAX_RECORD = 1 << 28
"""No message of the control plane comes near; a longer length is damage."""

_HEAD = struct.Struct("<IIQ")


class JournalLike(Protocol):
    """Where a controller writes what it accepted, before it answers."""

    def append(self, record: Record) -> None:
        """Write one record. An exception is final: the controller must end, since memory is ahead of the journal."""
        ...

    def close(self) -> None: ...


class MemoryJournal:
    """Keeps the records in a list: for tests and for a queue that lives and dies with one process."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def append(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


class NullJournal:
    """Keeps nothing: for a queue that lives and dies with one process."""

    def append(self, record: Record) -> None:
        pass

    def close(self) -> None:
        pass


class Journal:
    """Appends records to a file.

    Invariant: the file is, at every moment, the magic and whole records, then at most one incomplete record; what
    `append` returned from is in the operating system's hands (a killed process loses nothing), and on the disk if
    `fsync` is set (a dead machine loses nothing either).
    """

    def __init__(self, path: str | Path, *, fsync: bool = False) -> None:
        """Open `path` for appending, and make it if need be. Call `read_journal` first: it cuts a torn end off."""
        self.path = Path(path)
        self._fsync = fsync
        self._encoder = msgspec.msgpack.Encoder()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if os.fstat(self._fd).st_size == 0:
            self._write(MAGIC)

    def append(self, record: Record) -> None:
        """Write one record. Raises OSError (disk full, ...), after which this journal must not be used any more."""
        payload = self._encoder.encode(record)
        self._write(frame(payload))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        if self._fsync:
            os.fdatasync(self._fd)


def frame(payload: bytes) -> bytes:
    """A payload as it stands in the file."""
    length = len(payload)
    return _HEAD.pack(length, _guard(length), xxhash.xxh3_64_intdigest(payload)) + payload


def read_journal(path: str | Path, *, run: str | None = None, repair: bool = True) -> Iterator[Record]:
    """The records of a journal, in order; nothing if there is no file.

    A torn record at the end is cut off the file once all others were yielded (with `repair`). Raises Corrupt with the
    offset for any other damage, another format version, or a journal of another run.
    """
    path = Path(path)
    if not path.exists():
        return
    data = path.read_bytes()
    end = yield from _records(path, data, run)
    if end < len(data) and repair:
        os.truncate(path, end)


def _records(path: Path, data: bytes, run: str | None) -> Iterator[Record]:
    """Yields the records; returns the offset at which whole records end."""
    if len(data) < len(MAGIC) and MAGIC.startswith(data):
        return 0
    _check_magic(path, data)
    decoder = msgspec.msgpack.Decoder(Record)
    at, seq = len(MAGIC), 0
    while (payload := _payload(path, data, at)) is not None:
        try:
            record = decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"{path}: the record at byte {at} is none of format {FORMAT}: {error}") from error
        seq += 1
        _check_order(path, at, seq, record, run)
        yield record
        at += _HEAD.size + len(payload)
    return at


def _payload(path: Path, data: bytes, at: int) -> memoryview | None:
    """The payload of the record at `at`; None if the file ends there, or within that record."""
    if len(data) - at < _HEAD.size:
        return None
    length, guard, digest = _HEAD.unpack_from(data, at)
    if guard != _guard(length) or length > MAX_RECORD:
        if not any(data[at:]):
            return None  # a machine that died may leave zeros where the last record would have been
        raise Corrupt(f"{path}: damaged at byte {at}: the length of a record does not match its guard. {_ADVICE}")
    payload = memoryview(data)[at + _HEAD.size : at + _HEAD.size + length]
    if len(payload) < length:
        return None
    if xxhash.xxh3_64_intdigest(payload) != digest:
        raise Corrupt(f"{path}: damaged: the record at byte {at} ({length} bytes) does not match its digest. {_ADVICE}")
    return payload


def _check_magic(path: Path, data: bytes) -> None:
    found = data[: len(MAGIC)]
    if found == MAGIC:
        return
    if found[:-1] == MAGIC[:-1]:
        raise Corrupt(f"{path} has journal format {found[-1]}; this version reads format {FORMAT}")
    raise Corrupt(f"{path} is not a queue journal (it begins with {found!r})")


def _check_order(path: Path, at: int, seq: int, record: Record, run: str | None) -> None:
    if record.seq != seq:
        raise Corrupt(f"{path}: the record at byte {at} has number {record.seq}, expected {seq}: records are missing")
    life = record.mutation
    if seq == 1 and not isinstance(life, Life):
        raise Corrupt(f"{path}: the first record is a {type(life).__name__}, expected the controller's Life")
    if isinstance(life, Life) and run is not None and life.run != run:
        raise Corrupt(f"{path} belongs to run {life.run!r}, not to {run!r}; start in that run's directory")


_ADVICE = "Restore the file from a copy, or remove it and resume from a checkpoint (what was done since is redone)."


def _guard(length: int) -> int:
    return xxhash.xxh32_intdigest(length.to_bytes(4, "little"))
