"""Snapshot files: the controller's state after one record of the journal, so that only those after it are replayed.

    snapshot-<record>       magic(8 bytes: "TQSNAPS" and the format version) then frames as in a journal
    first frame             ["snapshot", run, record]
    frames                  one section of the state each (ledger/dump.py, and what recovery.py adds)
    last frame              ["end", number of sections]

A file gets its name when it is whole and on the disk; what has no such name is no snapshot. Everything is msgpack of
plain values, and little-endian arrays as bytes: nothing that is read is executed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from transfer_queue.errors import Corrupt
from transfer_queue.failpoints import failpoint
from transfer_queue.storage.journal import frame, read_frame, sync_directory
from transfer_queue.storage.private import open_regular

FORMAT = 1

MAGIC = b"TQSNAPS" + bytes([FORMAT])

BUFFER = 1 << 20


def snapshot_file(journal: Path, record: int) -> Path:
    """The snapshot after `record`, beside the journal."""
    return journal.with_name(f"snapshot-{record:016x}")


def snapshots(journal: str | Path) -> list[tuple[int, Path]]:
    """(record, file) of all snapshots beside a journal, newest first."""
    found = [path for path in Path(journal).parent.glob("snapshot-*") if len(path.name) == len("snapshot-") + 16]
    return sorted(((int(path.name[-16:], 16), path) for path in found), reverse=True)


def write_snapshot(journal: Path, run: str, record: int, sections: Iterable[list[Any]]) -> Path:
    """Write a whole snapshot, durably, then give it its name. Raises OSError; then there is none."""
    path = snapshot_file(journal, record)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    encode = msgspec.msgpack.Encoder().encode
    fd = open_regular(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        with open(fd, "wb", buffering=BUFFER) as file:
            file.write(MAGIC + frame(encode(["snapshot", run, record])))
            count = 0
            for section in sections:
                file.write(frame(encode(section)))
                count += 1
                if count == 1:
                    file.flush()
                    failpoint("snapshot.mid_write")
            file.write(frame(encode(["end", count])))
            file.flush()
            os.fsync(fd)
        failpoint("snapshot.before_rename")
        os.rename(unfinished, path)
        failpoint("snapshot.after_rename")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    sync_directory(path.parent)
    return path


def read_snapshot(path: Path, record: int, run: str | None = None) -> Iterator[list[Any]]:
    """The sections of a snapshot. Raises Corrupt, at the latest at its end, unless it is whole and of this run."""
    decode = msgspec.msgpack.Decoder(list).decode
    with os.fdopen(open_regular(path, error=Corrupt), "rb", BUFFER) as file:
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            raise Corrupt(f"{path} begins with {magic!r}, expected {MAGIC!r}: damaged, or of another version")
        count = -1
        while True:
            section = _decoded(path, file, decode)
            if count < 0:
                _check_begin(path, section, record, run)
            elif section[0] == "end":
                break
            else:
                yield section
            count += 1
        if section != ["end", count] or file.read(1):
            raise Corrupt(f"{path}: damaged: {count} sections, then {section} and something more")


def _decoded(path: Path, file: BinaryIO, decode: Callable[[bytes], list[Any]]) -> list[Any]:
    at = file.tell()
    payload = read_frame(path, file)
    if payload is None:
        raise Corrupt(f"{path}: cut off in the section at byte {at}")
    try:
        section = decode(payload)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path}: the section at byte {at} is none: {error}") from error
    if not section:
        raise Corrupt(f"{path}: the section at byte {at} is empty")
    return section


def _check_begin(path: Path, section: list[Any], record: int, run: str | None) -> None:
    if section[0] != "snapshot" or len(section) != 3 or section[2] != record:
        raise Corrupt(f"{path} does not begin as the snapshot after record {record}: {section[:3]}")
    if run is not None and section[1] != run:
        raise Corrupt(f"{path} belongs to run {section[1]!r}, not to {run!r}; start in that run's directory")
