"""Writing a checkpoint: see the package."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import xxhash

from transfer_queue.checkpoint.format import (
    FORMAT,
    Manifest,
    Page,
    PageColumn,
    PageEntry,
    PartitionEntry,
)
from transfer_queue.checkpoint.placing import prepare, put_in_place, sync_directory
from transfer_queue.clients.async_client import ATTEMPTS, QueueClient
from transfer_queue.errors import Invalid, NotFound, QueueError, SegmentGone
from transfer_queue.keys import UNNAMED
from transfer_queue.net.bounds import check_size
from transfer_queue.net.messages import Block, FieldPlace, Located, Rows
from transfer_queue.storage.columns import Column, aligned

log = logging.getLogger(__name__)

ROWS, BYTES = 512, 32 << 20
"""Rows and about the bytes of a page at most: what is in memory at once, several times."""

_encode = msgspec.msgpack.Encoder().encode


async def save(
    client: QueueClient, directory: str | PathLike[str], *, include_storage: bool = True,
    metadata: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint; one that was in `directory` is replaced. Raises Invalid for metadata that JSON cannot hold,
    or for a directory that cannot be made or replaced, or holds something else; OSError, naming it, if its disk has no
    room."""
    _check_metadata(metadata)
    target, work, file = await asyncio.to_thread(prepare, directory)
    try:
        entries = []
        for name, tasks in (await _partitions(client)).items():
            path = work / f"{len(entries):05}.rows"
            entries.append(await _save_partition(client, name, tasks, path, include_storage))
        manifest = Manifest(FORMAT, include_storage, metadata or {}, entries)
        finishing = asyncio.ensure_future(asyncio.to_thread(finish, work, target, file, manifest))
        try:
            await asyncio.shield(finishing)
        finally:  # who is cancelled waits too: nothing may be removed under a thread that puts it in place
            await asyncio.wait([finishing])
    except OSError as error:
        if isinstance(error, QueueError):
            raise
        raise OSError(error.errno, f"the checkpoint was not written ({error.strerror})", str(target)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        file.close()


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
            entry.pages.append(await asyncio.to_thread(write_page, file, rows, columns, consumed))
            entry.rows += len(rows.keys)
            after = int(np.frombuffer(rows.rows, np.int64)[-1])
        file.flush()
        await asyncio.to_thread(os.fsync, file.fileno())
    return entry


Present = tuple[str, Column, np.ndarray]
"""A field, its values in some rows, and the places of those in their page."""


async def _read_page(client: QueueClient, name: str, after: int, include_storage: bool) -> tuple[Rows, list[Present]]:
    """The next rows with their columns; looked up again if they move meanwhile. Raises NotFound, SegmentGone."""
    gone = SegmentGone(f"rows of {name!r} did not stand still")
    count = ROWS
    for attempt in range(ATTEMPTS):
        rows = await client.find(name, after=after, count=count, located=include_storage)
        if rows.located is not None and (fits := _fitting(rows.located)) < len(rows.keys):
            count = fits
            rows = await client.find(name, after=after, count=count, located=True)
        try:
            return rows, await columns_of(client, rows.located)
        except SegmentGone as error:
            gone = error
            await asyncio.sleep(min(0.5, 0.05 * attempt))
    raise gone


def _fitting(located: Located) -> int:
    """How many of these rows are about BYTES."""
    nbytes = float(row_bytes(located).sum())
    return len(located.keys) if nbytes <= BYTES else max(1, int(len(located.keys) * BYTES / nbytes))


def row_bytes(located: Located) -> np.ndarray:
    """About how many bytes each row takes: its share of the blocks in which it lies. float64[rows]"""
    per_row = np.array([block.nbytes / block.rows for block in located.blocks])
    nbytes = np.zeros(len(located.keys))
    for place in located.places:
        block = np.frombuffer(place.block, "<i4")
        there = block >= 0
        nbytes[there] += per_row[block[there]]
    return nbytes


async def columns_of(client: QueueClient, located: Located | None) -> list[Present]:
    """Field by field, since not every row has each, and in each the rows that were put in one form, so that they come
    back as they were put."""
    found: list[Present] = []
    if located is None:
        return found
    forms: dict[Form, int] = {}
    form_of = np.array([forms.setdefault(_form(block), len(forms)) for block in located.blocks], np.int32)
    for place in located.places:
        block, index = np.frombuffer(place.block, "<i4"), np.frombuffer(place.index, "<i4")
        there = np.flatnonzero(block >= 0).astype(np.int32)
        form = form_of[block[there]]
        for at in (there[form == number] for number in np.unique(form)):
            part = FieldPlace(place.field, block[at].tobytes(), index[at].tobytes())
            keys = [located.keys[row] for row in at.tolist()]
            one = msgspec.structs.replace(located, keys=keys, tags=[], places=[part])
            found.append((place.field, (await client.read(one))[place.field], at))
    return found


Form = tuple[str, str, tuple[int, ...]]


def _form(block: Block) -> Form:
    """Rows of several lengths are of one form, also if each was put alone."""
    if block.kind == "dense" and block.shape:
        return "ragged", block.dtype, tuple(block.shape[1:])
    return block.kind, block.dtype, tuple(block.shape)


async def _consumed(client: QueueClient, name: str, rows: Rows, task: str, after: int) -> bytes:
    """One byte a row; a row that was cleared since counts as it would be found: not at all."""
    serials: list[int] = np.frombuffer(rows.rows, np.int64).tolist()
    flags: dict[int, int] = {}
    more = True
    while more and after < serials[-1]:
        found = await client.find(name, fields=[], task=task, after=after, count=2 * ROWS)
        flags.update(zip(np.frombuffer(found.rows, np.int64).tolist(), found.consumed, strict=True))
        more, after = found.more, max(flags, default=after)
    return bytes(flags.get(serial, 0) for serial in serials)


def write_page(file: BinaryIO, rows: Rows, columns: list[Present], consumed: dict[str, bytes]) -> PageEntry:
    described, end = [], 0
    for field, column, at in columns:
        block = Block(field, 0, end, column.nbytes, column.rows, column.kind, column.dtype, column.shape, 0)
        described.append(PageColumn(block, at.tobytes()))
        end += aligned(column.nbytes)
    data = np.zeros(end, np.uint8)
    for one, (_, column, _) in zip(described, columns, strict=True):
        column.write_to(data[one.block.offset : one.block.offset + one.block.nbytes])
    header = _encode(Page(rows.keys, rows.tags, consumed, described))
    digest = xxhash.xxh3_128(header)
    digest.update(data.data)
    file.write(header)
    file.write(data.data)
    return PageEntry(len(header), end, digest.hexdigest())


def finish(work: Path, target: Path, file: BinaryIO, manifest: Manifest) -> None:
    """The manifest last; then the whole takes its place."""
    body = msgspec.json.encode(manifest)
    file.write(body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
    sync_directory(work)
    put_in_place(work, target)


def _check_metadata(metadata: dict[str, Any] | None) -> None:
    check_size("checkpoint metadata", metadata)
    try:
        same = msgspec.json.decode(msgspec.json.encode(metadata or {}), type=dict[str, Any]) == (metadata or {})
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise Invalid(f"checkpoint metadata holds what JSON cannot: {error}") from None
    except RecursionError:
        raise Invalid("checkpoint metadata is nested too deeply, or contains itself") from None
    if not same:
        raise Invalid("checkpoint metadata would not come back as it is; give strings, numbers, lists and dicts by str")
