"""Rows that are moved: read from their blocks, checked against the digests, and written to one new segment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transfer_queue.errors import Invalid
from transfer_queue.net.messages import Block, Segment, Survivors
from transfer_queue.storage.arena import Extent, fill, verify, within
from transfer_queue.storage.columns import Column, aligned, read_block
from transfer_queue.storage.gather import join_single
from transfer_queue.storage.memory import PAGE
from transfer_queue.storage.segments import is_durable
from transfer_queue.storage.unit_files import UnitFiles

_Source = tuple[Block, memoryview, np.ndarray]
"""A block, its bytes, and which of its rows survive."""


def compact(
    files: UnitFiles, batches: Sequence[Survivors], *, spilled: bool = False
) -> tuple[Segment, list[list[Block]]]:
    """The segment made, in memory or on disk, which has no room left, and the blocks of each batch in it. What lay in a
    durable segment does so again.

    Raises OSError (no room), SegmentGone, Corrupt, Invalid; nothing is left behind then.
    """
    columns = [_columns(files, batch) for batch in batches]
    total = sum(aligned(column.nbytes) for batch in columns for column in batch.values())
    durable = spilled and any(is_durable(b.segment) for batch in batches for blocks, _ in batch.sources for b in blocks)
    segment = files.make_for_survivors(max(PAGE, -(-total // PAGE) * PAGE), spilled=spilled, durable=durable)
    try:
        blocks = _write(files.writable(segment), segment.segment, columns)
        if durable:
            files.sync(segment.segment)
        return segment, blocks
    except BaseException:
        files.free([segment.segment])
        raise


def _columns(files: UnitFiles, batch: Survivors) -> dict[str, Column]:
    """The survivors of all sources, by field."""
    if not batch.sources:
        raise Invalid("survivors of nothing")
    sources: dict[str, list[_Source]] = {}
    for blocks, index in batch.sources:
        rows = np.frombuffer(index, "<i4")
        for block in blocks:
            data = within(block, files.data(block.segment).data)
            verify(block, data)
            sources.setdefault(block.field, []).append((block, data, rows))
    return {field: _column(parts) for field, parts in sources.items()}


def _column(parts: list[_Source]) -> Column:
    blocks, data, rows = zip(*parts, strict=True)
    if len(parts) > 1 and all(block.rows == 1 for block in blocks) and all(index.tolist() == [0] for index in rows):
        joined = join_single(blocks, data, np.empty)  # what agents put, a row at a time
        if joined is not None:
            return joined
    columns = [read_block(block, memory).take(index) for block, memory, index in parts]
    return columns[0] if len(columns) == 1 else Column.concat(columns)


def _write(data: np.ndarray, segment: int, batches: list[dict[str, Column]]) -> list[list[Block]]:
    at, written = 0, []
    for columns in batches:
        blocks: list[Block] = []
        for field, column in columns.items():
            nbytes = column.nbytes
            blocks.append(fill(Extent(segment, at, nbytes, data[at : at + nbytes]), field, column))
            at += aligned(nbytes)
        written.append(blocks)
    return written
