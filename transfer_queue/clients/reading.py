"""From where rows lie to their columns: at most one copy, or views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from transfer_queue.clients.access import UnitAccess
from transfer_queue.net.messages import Block, Located
from transfer_queue.storage.columns import Column, copied, read_block
from transfer_queue.storage.gather import RowsOf, arrays_of, gather, join_single, place_of_one, places, run_of
from transfer_queue.storage.memory import Empty


async def read_columns(
    access: UnitAccess, located: Located, *, copy: bool, mixed: RowsOf = arrays_of
) -> tuple[dict[str, Column], int]:
    """The fields of a Lookup's answer, copied, and how many bytes were copied. `mixed`: see gather.

    With `copy` false, fields whose rows lie one after another in one block are views, see UnitAccess.view. Raises
    SegmentGone, Corrupt.
    """
    if copy and len(located.keys) == 1:
        return await _read_one(access, located)
    found = places(located)
    runs = {} if copy else {field: run for field, where in found.items() if (run := run_of(*where)) is not None}
    copied = {field: where for field, where in found.items() if field not in runs}
    asked = np.zeros(len(located.blocks), np.int64)
    for block, _ in copied.values():
        asked += np.bincount(block, minlength=len(asked))
    used, viewed = np.flatnonzero(asked).tolist(), sorted({block for block, _, _ in runs.values()})
    blocks = [located.blocks[number] for number in used]
    data = dict(zip(used, await access.fetch(blocks, asked[used].tolist()), strict=True))
    data |= zip(viewed, await access.view([located.blocks[number] for number in viewed]), strict=True)
    result = {}
    try:
        for field, (block, row) in found.items():
            if field in runs:
                number, start, end = runs[field]
                result[field] = read_block(located.blocks[number], data[number]).view(start, end)
            else:
                result[field] = _copied(field, located.blocks, data, block, row, access.results.empty, mixed)
    except Exception:  # Corrupt, or whatever numpy says about lengths that are none
        access.check(blocks)  # raises SegmentGone if these are the bytes of another put by now
        raise
    access.check(blocks)
    return result, sum(result[field].nbytes for field in copied)


async def _read_one(access: UnitAccess, located: Located) -> tuple[dict[str, Column], int]:
    """The same of one row, as an agent worker reads a prompt: several times quicker than with arrays of one."""
    found = {place.field: place_of_one(place, located.blocks) for place in located.places}
    asked = Counter(number for number, _ in found.values())
    used = sorted(asked)
    blocks = [located.blocks[number] for number in used]
    data = dict(zip(used, await access.fetch(blocks, [asked[number] for number in used]), strict=True))
    result = {}
    try:
        for field, (number, row) in found.items():
            column = read_block(located.blocks[number], data[number]).view(row, row + 1)
            result[field] = replace(column, values=copied(column.values, access.results.empty))
    except Exception:  # as above
        access.check(blocks)
        raise
    access.check(blocks)
    return result, sum(column.nbytes for column in result.values())


def _copied(
    field: str, blocks: Sequence[Block], data: Mapping[int, memoryview], block: np.ndarray, row: np.ndarray,
    empty: Empty, mixed: RowsOf,
) -> Column:  # fmt: skip
    numbers = block.tolist()
    if len(numbers) > 1 and blocks[numbers[0]].rows == 1:
        joined = join_single([blocks[n] for n in numbers], [data[n] for n in numbers], empty)
        if joined is not None:
            return joined
    columns = {number: read_block(blocks[number], data[number]) for number in set(numbers)}
    return gather(field, block, row, columns, empty=empty, mixed=mixed)
