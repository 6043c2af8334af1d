"""Checkpoints: all plain rows of a queue in a directory. Rows of prompt groups are left out: their journal keeps them.

    manifest.json    format, what was saved, and of each partition its file and pages (bytes, xxh3-128); its own digest
    00000.rows       one partition: pages of up to ROWS rows or BYTES, each a msgpack Page and then its aligned columns

A row is saved as it was at one moment, tags included; rows that are put, consumed or cleared while a checkpoint is
written may or may not be so in it. The directory appears when all is on disk. A load checks every
digest before it changes anything, fills partitions that nobody sees and puts them in place in one step. Nothing is
unpickled: the columns are those of segments. One process at a time loads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import xxhash

from transfer_queue.async_client import ATTEMPTS, QueueClient
from transfer_queue.errors import Corrupt, Invalid, NotFound, SegmentGone
from transfer_queue.keys import UNNAMED
from transfer_queue.net.messages import Block, FieldPlace, Located, Rows, Tag
from transfer_queue.storage.columns import Column, aligned, read_block

log = logging.getLogger(__name__)

FORMAT = 1

ROWS, BYTES = 512, 32 << 20
"""Rows and about the bytes of a page at most: what is in memory at once, several times."""

STAGED = f"{UNNAMED}load."
"""What the names of partitions begin with while a load fills them."""


class PageColumn(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One field: where its bytes lie (`offset` within the page's columns), and which rows have it (int32)."""

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


_encode = msgspec.msgpack.Encoder().encode
_decode_page = msgspec.msgpack.Decoder(Page).decode


# --- saving --------------------------------------------------------------------------------------------------------


async def save(
    client: QueueClient, directory: str | PathLike[str], *, include_storage: bool = True,
    metadata: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint; one that was in `directory` is replaced. Raises Invalid for metadata that JSON cannot hold,
    or if something else is in the directory."""
    _check_metadata(metadata)
    target, work = await asyncio.to_thread(_prepare, directory)
    try:
        entries = []
        for name, tasks in (await _partitions(client)).items():
            path = work / f"{len(entries):05}.rows"
            entries.append(await _save_partition(client, name, tasks, path, include_storage))
        manifest = Manifest(FORMAT, include_storage, metadata or {}, entries)
        await asyncio.to_thread(_finish, work, target, manifest)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _prepare(directory: str | PathLike[str]) -> tuple[Path, Path]:
    """Where the checkpoint is to be, and where it is made."""
    target = Path(directory).absolute()
    if target.exists() and any(target.iterdir()) and not (target / "manifest.json").exists():
        raise Invalid(f"{target} holds something that is no checkpoint of a queue; name another directory")
    work = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    work.mkdir(mode=0o700, parents=True)
    return target, work


def read_manifest(directory: str | PathLike[str]) -> Manifest:
    """What a checkpoint says of itself, `metadata` included. Raises Invalid if there is none, Corrupt."""
    path = Path(directory) / "manifest.json"
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise Invalid(f"{directory} holds no checkpoint of a queue: manifest.json is missing") from None
    body, _, digest = text.rstrip(b"\n").rpartition(b"\n")
    if digest.decode(errors="replace") != xxhash.xxh3_128_hexdigest(body):
        raise Corrupt(f"{path} does not match its digest (its last line); take another checkpoint")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path}: {error}") from None
    if manifest.format != FORMAT:
        raise Invalid(f"{path} has format {manifest.format}; this version reads {FORMAT}")
    return manifest


async def _partitions(client: QueueClient) -> dict[str, list[str]]:
    """The partitions of plain rows, with their consumer tasks."""
    found = {}
    for name, stats in (await client.stats()).partitions.items():
        if name.startswith(UNNAMED):
            continue
        if stats.next_order or any(stats.depth.values()):
            log.warning("checkpoint: partition %r holds prompt groups, which the journal keeps; it is left out", name)
            continue
        found[name] = list(stats.consumers)
    return found


async def _save_partition(
    client: QueueClient, name: str, tasks: list[str], path: Path, include_storage: bool
) -> PartitionEntry:
    entry = PartitionEntry(name, path.name, 0, [])
    after = -1
    with path.open("wb") as file:
        while True:
            try:
                rows, columns = await _read_page(client, name, after, include_storage)
            except NotFound:  # cleared meanwhile
                break
            if not rows.keys:
                break
            consumed = {task: await _consumed(client, name, rows, task, after) for task in tasks}
            entry.pages.append(await asyncio.to_thread(_write_page, file, rows, columns, consumed))
            entry.rows += len(rows.keys)
            after = int(np.frombuffer(rows.rows, np.int64)[-1])
        file.flush()
        await asyncio.to_thread(os.fsync, file.fileno())
    return entry


_Present = dict[str, tuple[Column, np.ndarray]]
"""By field: the values, and the places of the rows that have it."""


async def _read_page(client: QueueClient, name: str, after: int, include_storage: bool) -> tuple[Rows, _Present]:
    """The next rows with their columns; looked up again if they move meanwhile. Raises NotFound, SegmentGone."""
    gone = SegmentGone(f"rows of {name!r} did not stand still")
    count = ROWS
    for attempt in range(ATTEMPTS):
        rows = await client.find(name, after=after, count=count, located=include_storage)
        if rows.located is not None and (fits := _fitting(rows.located)) < len(rows.keys):
            count = fits
            rows = await client.find(name, after=after, count=count, located=True)
        try:
            return rows, await _columns(client, rows.located)
        except SegmentGone as error:
            gone = error
            await asyncio.sleep(min(0.5, 0.05 * attempt))
    raise gone


def _fitting(located: Located) -> int:
    """How many of these rows are about BYTES."""
    per_row = [block.nbytes / block.rows for block in located.blocks]
    nbytes = 0.0
    for place in located.places:
        block = np.frombuffer(place.block, "<i4")
        nbytes += float(np.asarray(per_row)[block[block >= 0]].sum())
    return len(located.keys) if nbytes <= BYTES else max(1, int(len(located.keys) * BYTES / nbytes))


async def _columns(client: QueueClient, located: Located | None) -> _Present:
    """Field by field, since not every row has each."""
    found: _Present = {}
    if located is None:
        return found
    for place in located.places:
        block, index = np.frombuffer(place.block, "<i4"), np.frombuffer(place.index, "<i4")
        at = np.flatnonzero(block >= 0).astype(np.int32)
        part = FieldPlace(place.field, block[at].tobytes(), index[at].tobytes())
        keys = [located.keys[row] for row in at.tolist()]
        one = msgspec.structs.replace(located, keys=keys, tags=[], places=[part])
        found[place.field] = ((await client.read(one))[place.field], at)
    return found


async def _consumed(client: QueueClient, name: str, rows: Rows, task: str, after: int) -> bytes:
    """One byte a row; a row that was cleared since counts as it would be found: not at all."""
    found = await client.find(name, fields=[], task=task, after=after, count=2 * ROWS)
    flags = dict(zip(np.frombuffer(found.rows, np.int64).tolist(), found.consumed, strict=True))
    return bytes(flags.get(serial, 0) for serial in np.frombuffer(rows.rows, np.int64).tolist())


def _write_page(file: BinaryIO, rows: Rows, columns: _Present, consumed: dict[str, bytes]) -> PageEntry:
    described, end = [], 0
    for field, (column, at) in columns.items():
        block = Block(field, 0, end, column.nbytes, column.rows, column.kind, column.dtype, column.shape, 0)
        described.append(PageColumn(block, at.tobytes()))
        end += aligned(column.nbytes)
    data = np.zeros(end, np.uint8)
    for one, (column, _) in zip(described, columns.values(), strict=True):
        column.write_to(data[one.block.offset : one.block.offset + one.block.nbytes])
    header = _encode(Page(rows.keys, rows.tags, consumed, described))
    digest = xxhash.xxh3_128(header)
    digest.update(data.data)
    file.write(header)
    file.write(data.data)
    return PageEntry(len(header), end, digest.hexdigest())


def _finish(work: Path, target: Path, manifest: Manifest) -> None:
    """The manifest last; then the whole takes its place."""
    body = msgspec.json.encode(manifest)
    with (work / "manifest.json").open("wb") as file:
        file.write(body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(work)
    old = target.with_name(f".{target.name}.old.{secrets.token_hex(4)}")
    if target.exists():
        os.rename(target, old)
    os.rename(work, target)
    _sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_metadata(metadata: dict[str, Any] | None) -> None:
    try:
        same = msgspec.json.decode(msgspec.json.encode(metadata or {}), type=dict[str, Any]) == (metadata or {})
    except (TypeError, msgspec.MsgspecError) as error:
        raise Invalid(f"checkpoint metadata holds what JSON cannot: {error}") from None
    if not same:
        raise Invalid("checkpoint metadata would not come back as it is; give strings, numbers, lists and dicts by str")


# --- loading -------------------------------------------------------------------------------------------------------


async def load(client: QueueClient, directory: str | PathLike[str]) -> None:
    """Put back a checkpoint, all or nothing. Raises Invalid, Corrupt, and Conflict if a partition of the same name has
    prompt groups."""
    directory = Path(directory)
    manifest = read_manifest(directory)
    await asyncio.to_thread(_verify, directory, manifest)
    await _sweep(client)
    stem = f"{STAGED}{secrets.token_hex(6)}."
    names: dict[str, str] = {}
    consumed: dict[str, dict[str, bytes]] = {}
    try:
        for number, entry in enumerate(manifest.partitions):
            staged = f"{stem}{number}"
            if entry.pages:
                names[staged] = entry.name
                consumed[staged] = await _fill(client, staged, directory, entry)
        if names:
            await client.adopt(names, consumed)
    finally:
        await _sweep(client)


async def _sweep(client: QueueClient) -> None:
    """Remove what loads that failed have left."""
    for name in (await client.stats()).partitions:
        if name.startswith(STAGED):
            await client.clear_partition(name)


async def _fill(client: QueueClient, staged: str, directory: Path, entry: PartitionEntry) -> dict[str, bytes]:
    """Put the rows of a partition; the serials of those that each task had consumed."""
    consumed: dict[str, list[np.ndarray]] = {}
    for page, data in _pages(directory, entry):
        await client.put(staged, page.keys, {}, tags=page.tags)
        for rows, columns in _by_rows(page, data):
            await client.put(staged, [page.keys[row] for row in rows.tolist()], columns)
        found = await client.find(staged, keys=page.keys, fields=[])
        serials = np.frombuffer(found.rows, np.int64)
        for task, flags in page.consumed.items():
            consumed.setdefault(task, []).append(serials[np.frombuffer(flags, np.uint8) != 0])
    return {task: np.concatenate(parts).astype("<i8").tobytes() for task, parts in consumed.items()}


def _by_rows(page: Page, data: np.ndarray) -> Iterator[tuple[np.ndarray, dict[str, Column]]]:
    """The columns that the same rows have, together."""
    together: dict[bytes, dict[str, Column]] = {}
    for one in page.columns:
        block = one.block
        column = read_block(block, data[block.offset : block.offset + block.nbytes])
        together.setdefault(one.rows, {})[block.field] = column
    for rows, columns in together.items():
        yield np.frombuffer(rows, np.int32), columns


def _verify(directory: Path, manifest: Manifest) -> None:
    """Every page against its digest, and what it says of itself."""
    for entry in manifest.partitions:
        for page, data in _pages(directory, entry):
            _check_page(directory / entry.file, page, data)


def _pages(directory: Path, entry: PartitionEntry) -> Iterator[tuple[Page, np.ndarray]]:
    """The pages of a partition. Raises Corrupt."""
    path = directory / entry.file
    if path.name != entry.file or not path.is_file():
        raise Corrupt(f"{directory}: {entry.file!r} is missing; take another checkpoint")
    with path.open("rb") as file:
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
                yield _decode_page(header), data
            except msgspec.MsgspecError as error:
                raise Corrupt(f"{path}: page {number}: {error}") from None


def _check_page(path: Path, page: Page, data: np.ndarray) -> None:
    """A page is as this module writes it, so that nothing of a load fails later."""
    rows = len(page.keys)
    lengths = {len(page.tags), *(len(flags) for flags in page.consumed.values())}
    if lengths - {rows}:
        raise Corrupt(f"{path}: a page of {rows} rows has {sorted(lengths)} tags or flags")
    for one in page.columns:
        block = one.block
        if min(block.offset, block.nbytes) < 0 or block.offset + block.nbytes > len(data):
            raise Corrupt(f"{path}: column {block.field!r} ends beyond its page")
        at = np.frombuffer(one.rows, np.int32) if len(one.rows) % 4 == 0 else np.asarray([-1])
        if len(at) != block.rows or (len(at) and (at.min() < 0 or at.max() >= rows)):
            raise Corrupt(f"{path}: column {block.field!r} names rows that are not in its page")
        read_block(block, data[block.offset : block.offset + block.nbytes])
