"""From where rows lie to their columns: at most one copy, or views."""

from __future__ import annotations

import numpy as np

from transfer_queue.access import UnitAccess
from transfer_queue.net.messages import Located
from transfer_queue.storage.columns import Column, read_block
from transfer_queue.storage.gather import gather, places, run_of


async def read_columns(access: UnitAccess, located: Located, *, copy: bool) -> tuple[dict[str, Column], int]:
    """The fields of a Lookup's answer, copied, and how many bytes were copied.

    With `copy` false, fields whose rows lie one after another in one block are views, see UnitAccess.view. Raises
    SegmentGone, Corrupt.
    """
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
    columns = {number: read_block(located.blocks[number], bytes_) for number, bytes_ in data.items()}
    result = {
        field: columns[runs[field][0]].view(*runs[field][1:])
        if field in runs
        else gather(field, *found[field], columns, empty=access.results.empty)
        for field in found
    }
    access.check(blocks)
    return result, sum(result[field].nbytes for field in copied)
