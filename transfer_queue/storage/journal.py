"""The controller's journal: append-only files of accepted mutations, whose replay gives the ledger again.

    journal                 the records since the last snapshot was begun
    journal-<first>         older ones, by the number of their first record (16 hexadecimal digits)

    file    magic(8 bytes: "TQJOURN" and the format version) first u64 | guard u32 | then records
    record  length u32 | guard u32 | digest u64 | payload[length]

All integers are little-endian. `payload` is the msgpack form of `Record`, `digest` its xxh3-64; a guard is the xxh32 of
the number before it, so that a damaged length is never taken for the end of the file. The first record of all, and the
first of every later life of the controller, is a `Life` with format version, run id and epoch. Record numbers are
consecutive from 1, through all files; `first` is that of the file's first record.

What may be missing: a process that is killed leaves at most one incomplete record at the end of the newest file (torn,
cut off when the file is opened again); nobody got an answer for it. Any other difference is damage, and reading raises
Corrupt.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import xxhash

from transfer_queue.errors import Corrupt
from transfer_queue.net.messages import Life, Record
from transfer_queue.storage.private import open_regular, read_regular

FORMAT = 1

MAGIC = b"TQJOURN" + bytes([FORMAT])

MAX_RECORD = 1 << 28
"""No message of the control plane comes near; a longer length is damage."""

_HEAD = struct.Struct("<IIQ")
_FIRST = struct.Struct("<QI")

HEADER = len(MAGIC) + _FIRST.size

Sections = Callable[[], Iterable[list[Any]]]
"""Gives the controller's state of now, in sections (ledger/dump.py)."""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class JournalFailed(OSError):
    """The disk took no record: that of request `request` of `client`, if one asked. The file ends before it."""

    client = ""
    request = 0


class JournalLike(Protocol):
    """Where a controller writes what it accepted, before it answers."""

    lasting: bool
    """Whether a later controller finds it again."""

    def append(self, record: Record) -> None:
        """Write one record. An exception is final: the controller must end, since memory is ahead of the journal."""
        ...

    def settle(self, sections: Sections) -> None:
        """Called when the state is the one after the last record: a snapshot may be taken."""
        ...

    def sync(self) -> None:
        """All records so far are on the disk when this returns. An exception is final."""
        ...

    def begin_sync(self) -> tuple[Executor | None, Callable[[], None]]:
        """The same as work for a thread of that executor (None: of any), while records are appended. One at a time."""
        ...

    def close(self) -> None: ...


class MemoryJournal:
    """Keeps the records in a list, and how many of them are `synced`: for tests."""

    lasting = True

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.synced = 0

    def append(self, record: Record) -> None:
        self.records.append(record)

    def settle(self, sections: Sections) -> None:
        pass

    def sync(self) -> None:
        self.synced = len(self.records)

    def begin_sync(self) -> tuple[Executor | None, Callable[[], None]]:
        return None, partial(setattr, self, "synced", len(self.records))

    def close(self) -> None:
        pass


class NullJournal:
    """Keeps nothing: for a queue that lives and dies with one process."""

    lasting = False

    def append(self, record: Record) -> None:
        pass

    def settle(self, sections: Sections) -> None:
        pass

    def sync(self) -> None:
        pass

    def begin_sync(self) -> tuple[Executor | None, Callable[[], None]]:
        return None, self.sync

    def close(self) -> None:
        pass


class Journal:
    """Appends records to a file.

    Invariant: the file is, at every moment, the header and whole records, then at most one incomplete record; what
    `append` returned from is in the operating system's hands (a killed process loses nothing), and on the disk if
    `fsync` is set or `sync` was called after it (a dead machine loses nothing either).
    """

    def __init__(self, path: str | Path, *, first: int = 1, fsync: bool = False) -> None:
        """Open `path` for appending, and make it if need be, for records from number `first` on. Call `read_journals`
        before: it cuts a torn end off."""
        self.path = Path(path)
        self._fsync = fsync
        self._lasting = fsync  # what lies in other files, and their names, are on the disk
        self._encoder = msgspec.msgpack.Encoder()
        self._failed: OSError | None = None
        self._open(first)

    def append(self, record: Record) -> None:
        """Write one record. Raises JournalFailed (disk full, ...): what was written of the record is cut off, and so is
        every later one refused, though it might find room, since memory is ahead of the file from here on."""
        payload = self._encoder.encode(record)
        try:
            self._check_whole()
            self._write(frame(payload))
        except OSError as error:
            self._failed = self._failed or error
            failed = self._refusal(error)
            failed.client, failed.request = record.client, record.request
            raise failed from error

    def rotate(self, first: int) -> None:
        """Give the file its name for later, and begin a new one for records from number `first` on."""
        self._check_whole()
        if self._lasting:
            self._sync(os.dup(self._fd))
        self.close()
        before = _read_first(self.path)
        os.rename(self.path, rotated(self.path, before))
        self._open(first)

    def sync(self) -> None:
        """All records, in older files too, are on the disk when this returns. Raises JournalFailed."""
        self.begin_sync()()

    def begin_sync(self) -> Callable[[], None]:
        """The same as work for a thread, whatever happens to this journal meanwhile."""
        try:
            if not self._lasting:
                sync_journals(self.path)
                sync_directory(self.path.parent)
                sync_directory(self.path.parent.parent)
                self._lasting = True
            return partial(self._sync, os.dup(self._fd))
        except OSError as error:
            raise self._unsynced(error) from error

    def _sync(self, fd: int) -> None:
        try:
            if not self._fsync:
                os.fdatasync(fd)
        except OSError as error:
            raise self._unsynced(error) from error
        finally:
            os.close(fd)

    def _unsynced(self, error: OSError) -> JournalFailed:
        """The kernel may have forgotten what it could not write, so that a second sync would prove nothing."""
        with contextlib.suppress(OSError):
            distrusted(self.path).touch(mode=0o600)
        return self._refusal(error)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _check_whole(self) -> None:
        if self._failed is not None:
            raise OSError(self._failed.errno, self._failed.strerror)

    def _refusal(self, error: OSError) -> JournalFailed:
        return JournalFailed(error.errno, error.strerror, str(self.path))

    def _open(self, first: int) -> None:
        try:
            self._fd = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, error=Corrupt)
            if os.fstat(self._fd).st_size == 0:
                self._write(header(first))
                if self._lasting:
                    sync_directory(self.path.parent)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise self._refusal(error) from error
            raise

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            if self._fsync:
                os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - (len(data) - len(view)))
            raise


def header(first: int) -> bytes:
    """The beginning of a file."""
    return MAGIC + _FIRST.pack(first, xxhash.xxh32_intdigest(first.to_bytes(8, "little")))


def frame(payload: bytes) -> bytes:
    """A payload as it stands in the file."""
    length = len(payload)
    return _HEAD.pack(length, _guard(length), xxhash.xxh3_64_intdigest(payload)) + payload


def rotated(path: Path, first: int) -> Path:
    """The name of an older file."""
    return path.with_name(f"{path.name}-{first:016x}")


def distrusted(path: Path) -> Path:
    """Is there if what stands in the files may not be on the disk, whatever a sync says. A machine that died may have
    forgotten it: then it has also forgotten what was not on the disk."""
    return path.with_name(f"{path.name}.failed")


def journal_files(path: str | Path) -> list[tuple[int, Path]]:
    """(first record, file) of the journal at `path` and of the older ones beside it, oldest first. Raises Corrupt."""
    path = Path(path)
    older = [file for file in path.parent.glob(f"{path.name}-*") if len(file.name) == len(path.name) + 17]
    files = sorted((int(file.name[-16:], 16), file) for file in older)
    if not os.path.lexists(path):
        return files
    with os.fdopen(open_regular(path, error=Corrupt), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
    if nbytes >= HEADER:
        files.append((_read_first(path), path))
    else:  # torn at its very beginning
        data = read_regular(path, error=Corrupt)
        if not MAGIC.startswith(data[: len(MAGIC)]):
            _check_magic(path, data)
        os.truncate(path, 0)
    return files


def sync_journals(path: Path) -> None:
    """Let all files but the newest be on the disk, as a snapshot that follows them will be."""
    for _, file in journal_files(path):
        if file != path:
            fd = open_regular(file, error=Corrupt)
            os.fsync(fd)
            os.close(fd)


def sync_directory(directory: Path) -> None:
    """Let new names in it survive a machine that dies."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_journals(path: str | Path, *, after: int = 0, run: str | None = None) -> Iterator[Record]:
    """The records with numbers above `after`, in order; nothing if there is no file.

    A torn record at the end is cut off the newest file once all others were yielded. Raises Corrupt with the offset for
    any other damage, another format version, a journal of another run, or if the records right after `after` are gone.
    """
    files = journal_files(path)
    first = max((i for i, (number, _) in enumerate(files) if number <= after + 1), default=None)
    if first is None:
        if not files and not after:
            return
        if not files:
            raise Corrupt(f"the journal {path} is gone, and with it the records from {after + 1} on. {ADVICE}")
        raise Corrupt(f"{files[0][1]} begins with record {files[0][0]}; those from {after + 1} on are gone. {ADVICE}")
    expected = files[first][0]
    for i, (number, file) in enumerate(files[first:], first):
        if number != expected:
            raise Corrupt(f"{file} begins with record {number}, expected {expected}: records are missing. {ADVICE}")
        data = read_regular(file, error=Corrupt)
        end, expected = yield from _records(file, data, number, after, run)
        if end < len(data):
            if i + 1 < len(files):
                raise Corrupt(f"{file}: cut at byte {end}, though it is not the newest journal. {ADVICE}")
            os.truncate(file, end)
    if expected <= after:
        raise Corrupt(f"{files[-1][1]} ends before record {after}: records are missing. {ADVICE}")


def _records(path: Path, data: bytes, first: int, after: int, run: str | None) -> Iterator[Record]:
    """Yields the records above `after`; returns the offset at which whole records end, and the number of the next."""
    _check_magic(path, data)
    decoder = msgspec.msgpack.Decoder(Record)
    at, seq = HEADER, first
    while (payload := _payload(path, data, at)) is not None:
        try:
            record = decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"{path}: the record at byte {at} is none of format {FORMAT}: {error}") from error
        _check_order(path, at, seq, record, run)
        if seq > after:
            yield record
        seq += 1
        at += _HEAD.size + len(payload)
    return at, seq


def _payload(path: Path, data: bytes, at: int) -> memoryview | None:
    """The payload of the record at `at`; None if the file ends there, or within that record."""
    if len(data) - at < _HEAD.size:
        return None
    length, guard, digest = _HEAD.unpack_from(data, at)
    if guard != _guard(length) or length > MAX_RECORD:
        if not any(data[at:]):
            return None  # a machine that died may leave zeros where the last record would have been
        raise Corrupt(f"{path}: damaged at byte {at}: the length of a record does not match its guard. {ADVICE}")
    payload = memoryview(data)[at + _HEAD.size : at + _HEAD.size + length]
    if len(payload) < length:
        return None
    if xxhash.xxh3_64_intdigest(payload) != digest:
        raise Corrupt(f"{path}: damaged: the record at byte {at} ({length} bytes) does not match its digest. {ADVICE}")
    return payload


def read_frame(path: Path, file: BinaryIO) -> bytes | None:
    """The payload of the frame where `file` stands; None if the file ends before it does. Raises Corrupt."""
    at, head = file.tell(), file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, guard, digest = _HEAD.unpack(head)
    if guard != _guard(length):
        raise Corrupt(f"{path}: damaged at byte {at}: a length does not match its guard")
    payload = file.read(length)
    if len(payload) < length:
        return None
    if xxhash.xxh3_64_intdigest(payload) != digest:
        raise Corrupt(f"{path}: damaged: the {length} bytes from {at} on do not match their digest")
    return payload


def _read_first(path: Path) -> int:
    """The number of a file's first record."""
    with os.fdopen(open_regular(path, error=Corrupt), "rb") as file:
        data = file.read(HEADER)
    _check_magic(path, data)
    first, guard = _FIRST.unpack_from(data, len(MAGIC))
    if guard != xxhash.xxh32_intdigest(first.to_bytes(8, "little")):
        raise Corrupt(f"{path}: damaged: its header does not match its guard. {ADVICE}")
    return first


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


ADVICE = (
    "Restore the file from a copy, or remove the journal and the snapshots beside it and resume from a checkpoint: "
    "what was done since is redone."
)


def _guard(length: int) -> int:
    return xxhash.xxh32_intdigest(length.to_bytes(4, "little"))
