"""Putting a checkpoint back: see the package."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import numpy as np

from transfer_queue.checkpoint.checking import check
from transfer_queue.checkpoint.format import Manifest, Page, PartitionEntry, find_manifest, pages_of
from transfer_queue.clients.async_client import QueueClient
from transfer_queue.errors import Conflict, Corrupt, NotFound, QueueError
from transfer_queue.keys import LOADING
from transfer_queue.storage.columns import Column, read_block

TRIES = 5
"""How often a load begins again because another checkpoint took the place of the one that it read."""


async def load(client: QueueClient, directory: str | PathLike[str]) -> None:
    """Put back a checkpoint, all or nothing; of several loads at once the last one stays. Raises Invalid, Corrupt, and
    Conflict if a partition of the same name has prompt groups, or rows were lost on the way."""
    found = await asyncio.to_thread(find_manifest, directory)
    for _ in range(TRIES):
        try:
            return await _load(client, *found)
        except (Corrupt, FileNotFoundError):
            before, found = found, await asyncio.to_thread(find_manifest, directory)
            if found == before:
                raise
    raise Conflict(f"{directory} was saved anew {TRIES} times while it was loaded; load it when that has ended")


async def _load(client: QueueClient, directory: Path, manifest: Manifest) -> None:
    """Raises also Corrupt or FileNotFoundError if another checkpoint takes its place meanwhile."""
    await asyncio.to_thread(check, directory, manifest)
    stem = f"{LOADING}{secrets.token_hex(12)}."
    entries = {f"{stem}{number}": entry for number, entry in enumerate(manifest.partitions) if entry.pages}
    consumed: dict[str, dict[str, bytes]] = {}
    try:
        for staged, entry in entries.items():
            consumed[staged] = await _fill(client, staged, directory, entry)
        if entries:
            names = {staged: entry.name for staged, entry in entries.items()}
            await client.adopt(names, consumed, {staged: entry.rows for staged, entry in entries.items()})
    except BaseException as error:
        for staged in entries:  # when the client dies, the controller does this
            with contextlib.suppress(QueueError):
                await client.clear_partition(staged)
        if isinstance(error, NotFound):
            raise Conflict(f"{directory}: rows were cleared while they were loaded; load again") from error
        raise
    finally:
        for staged in entries:
            await client.end_puts(staged)


async def _fill(client: QueueClient, staged: str, directory: Path, entry: PartitionEntry) -> dict[str, bytes]:
    """Put the rows of a partition; the serials of those that each task had consumed. Raises NotFound if they are
    cleared meanwhile."""
    consumed: dict[str, list[np.ndarray]] = {}
    pages = pages_of(directory, entry)
    while (found := await asyncio.to_thread(next, pages, None)) is not None:
        page, data = found
        await client.put(staged, page.keys, {}, tags=page.tags)
        listed = await client.find(staged, keys=page.keys, fields=[])
        serials = np.frombuffer(listed.rows, np.int64)
        if len(serials) != len(page.keys):
            raise NotFound(f"{len(page.keys) - len(serials)} rows of {staged!r} are gone")
        for rows, columns in _by_rows(page, data):
            keys = [page.keys[row] for row in rows.tolist()]
            await client.put(staged, keys, columns, rows=serials[rows].tobytes())
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
