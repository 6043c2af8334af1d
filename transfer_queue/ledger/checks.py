"""What is wrong with a request whatever the state of the ledger. Everything here raises Invalid."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from transfer_queue.errors import Invalid, QueueError
from transfer_queue.keys import try_split_row_key
from transfer_queue.net.messages import Block, GroupSpec, Tag, TaskSpec

MAX_NAME = 512
"""Bytes of a key, field, partition or task name: they are dictionary keys, not data."""

MAX_SESSIONS = 65536
"""Sessions of a group at most: each costs the ledger memory from its admission on."""

MAX_ORDER = 1 << 62


def check_name(what: str, name: str) -> None:
    if not name or len(name) > MAX_NAME:
        raise Invalid(f"{what} {name[:40]!r} has {len(name)} characters; expected 1 to {MAX_NAME}")


def check_unique(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise Invalid(f"{what} given twice: {some(twice)}")


def check_tag(key: str, tag: Tag) -> None:
    """Tags are journaled and sent around: plain values only."""
    for name, value in tag.items():
        if type(value) not in (str, int, float, bool, type(None)) or (type(value) is int and abs(value) >> 63):
            check_plain(f"tag {name!r} of {key!r}", value)


def check_plain(what: str, value: object) -> None:
    kind = type(value)
    if kind is list or kind is tuple:
        for element in value:  # pyright: ignore[reportGeneralTypeIssues]
            check_plain(what, element)
    elif kind is dict:
        for key, element in value.items():  # pyright: ignore[reportAttributeAccessIssue]
            check_plain(what, key)
            check_plain(what, element)
    elif kind not in (str, int, float, bool, type(None)):
        raise Invalid(f"{what} is a {kind.__name__}; tags are plain values (use .item() or .tolist(), or put a column)")
    elif kind is int and abs(value) >> 63:  # pyright: ignore[reportArgumentType]
        raise Invalid(f"{what} is {value}, beyond 64 bits")


def check_blocks(blocks: Sequence[Block], rows: int) -> None:
    """Each block is one column of all rows of the message, within its segment's possible bounds."""
    check_unique("field", [block.field for block in blocks])
    for block in blocks:
        check_name("field", block.field)
        if block.rows != rows:
            raise Invalid(f"column {block.field!r} has {block.rows} rows, the message has {rows}")
        if min(block.offset, block.nbytes, block.segment, *block.shape) < 0:
            raise Invalid(f"column {block.field!r}: negative segment, offset, size or shape")
        if block.kind == "dense":
            _check_dense(block)
        elif block.nbytes < 8 * (block.rows + 1):
            raise Invalid(f"column {block.field!r}: {block.nbytes} bytes cannot hold the offsets of {block.rows} rows")


def _check_dense(block: Block) -> None:
    size = 2 if block.dtype == "bfloat16" else _itemsize(block)
    expected = size * block.rows
    for extent in block.shape:
        expected *= extent
    if expected != block.nbytes:
        raise Invalid(
            f"column {block.field!r}: {block.rows} rows of {block.dtype}{list(block.shape)} take {expected} bytes, "
            f"the block has {block.nbytes}"
        )


def _itemsize(block: Block) -> int:
    try:
        dtype = np.dtype(block.dtype)
    except TypeError:
        raise Invalid(f"column {block.field!r}: unknown dtype {block.dtype!r}") from None
    if dtype.hasobject:
        raise Invalid(f"column {block.field!r}: dtype {block.dtype!r} holds references")
    return dtype.itemsize


def check_spec(spec: GroupSpec) -> None:
    check_name("uid", spec.uid)
    if not (1 <= spec.n <= MAX_SESSIONS and 0 <= spec.min_sessions <= spec.n and 0 <= spec.order <= MAX_ORDER):
        raise Invalid(
            f"group {spec.uid!r}: n={spec.n}, min_sessions={spec.min_sessions}, order={spec.order}; "
            f"expected 1 <= n <= {MAX_SESSIONS}, 0 <= min_sessions <= n, 0 <= order <= 2^62"
        )
    if try_split_row_key(spec.uid) is not None:
        raise Invalid(f"uid {spec.uid!r} looks like a trajectory key '<uid>_<session>_<index>'; choose another ending")
    check_tag(spec.uid, spec.tag)


def check_task(task: TaskSpec) -> None:
    check_name("task", task.name)
    if not task.ttl > 0 or task.max_deliver < 1:
        raise Invalid(f"task {task.name!r}: ttl={task.ttl}, max_deliver={task.max_deliver}; both must be positive")
    if task.stage == "prompt" and task.fields:
        raise Invalid(f"task {task.name!r} leases prompts: there are no rows yet whose {task.fields} it could wait for")


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first few names, and how many more there are."""
    text = ", ".join(repr(name) for name in islice(names, limit))
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def explain(error: QueueError, client: str, request_id: int) -> None:
    """Note on an error whose request it was."""
    if client:
        error.add_note(f"request {request_id} of {client}")
