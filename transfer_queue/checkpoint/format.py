"""What stands in a checkpoint, and how it is read: see the package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from transfer_queue.checkpoint.placing import MANIFEST, named, newest
from transfer_queue.errors import Corrupt, Invalid, QueueError
from transfer_queue.net.messages import Block, Tag
from transfer_queue.storage.private import open_regular, read_regular

FORMAT = 1


class PageColumn(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One field, in rows of one form: where its bytes lie (`offset` within the page's columns), and which rows these
    are (int32). A field that was put in several forms has several."""

    block: Block
    rows: bytes


class Page(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """`consumed`: by task, one byte a row."""

    keys: list[str]
    tags: list[Tag]
    consumed: dict[str, bytes]
    columns: list[PageColumn]


class PageEntry(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    header: int
    columns: int
    digest: str


class PartitionEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    file: str
    rows: int
    pages: list[PageEntry]


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    storage: bool
    metadata: dict[str, Any]
    partitions: list[PartitionEntry]


decode_page = msgspec.msgpack.Decoder(Page).decode


def read_manifest(directory: str | PathLike[str]) -> Manifest:
    """What a checkpoint says of itself, `metadata` included. Raises Invalid if there is none, Corrupt."""
    return find_manifest(directory)[1]


def find_manifest(directory: str | PathLike[str]) -> tuple[Path, Manifest]:
    """The same with where it is: beside `directory` if a save was killed while it replaced what was there."""
    path = named(directory)
    return newest(path, _read_manifest) or (path, _read_manifest(path))


def _read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        text = read_regular(path, error=Corrupt)
    except FileNotFoundError:
        raise Invalid(f"{directory} holds no checkpoint of a queue: manifest.json is missing") from None
    except NotADirectoryError:
        raise Invalid(f"{directory} is no checkpoint of a queue: it is no directory; name what was saved") from None
    except OSError as error:
        if isinstance(error, QueueError):
            raise
        raise Invalid(f"{directory} cannot be read as a checkpoint ({error.strerror}); name what was saved") from None
    body, _, digest = text.rstrip(b"\n").rpartition(b"\n")
    if digest.decode(errors="replace") != xxhash.xxh3_128_hexdigest(body):
        raise Corrupt(f"{path} does not match its digest (its last line); take another checkpoint")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Corrupt(f"{path}: {error}") from None
    if manifest.format != FORMAT:
        raise Invalid(f"{path} has format {manifest.format}; this version reads {FORMAT}")
    return manifest


def pages_of(directory: Path, entry: PartitionEntry) -> Iterator[tuple[Page, np.ndarray]]:
    """The pages of a partition. Raises Corrupt."""
    path = directory / entry.file
    if path.name != entry.file or not os.path.lexists(path):
        raise Corrupt(f"{directory}: {entry.file!r} is missing; take another checkpoint")
    with os.fdopen(open_regular(path, error=Corrupt), "rb") as file:
        left = os.fstat(file.fileno()).st_size
        for number, page in enumerate(entry.pages):
            left -= page.header + page.columns
            if min(page.header, page.columns, left) < 0:
                raise Corrupt(f"{path} ends in page {number}; take another checkpoint")
            header, data = file.read(page.header), np.frombuffer(file.read(page.columns), np.uint8)
            digest = xxhash.xxh3_128(header)
            digest.update(data.data)
            if digest.hexdigest() != page.digest:
                raise Corrupt(f"{path}: page {number} does not match its digest; take another checkpoint")
            try:
                yield decode_page(header), data
            except msgspec.MsgspecError as error:
                raise Corrupt(f"{path}: page {number}: {error}") from None
