"""What is wrong with a request whatever the state of the ledger. Everything here raises Invalid."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import islice

import msgspec
import numpy as np

from transfer_queue.errors import Invalid, QueueError
from transfer_queue.keys import try_split_row_key
from transfer_queue.net.bounds import MAX_GROUP_TAG, TAG_PARTS, check_size
from transfer_queue.net.messages import Block, GroupSpec, Tag, TaskSpec

MAX_NAME = 512
"""Bytes of a key, field, partition or task name: they are dictionary keys, not data."""

MAX_SESSIONS = 65536
"""Sessions of a group at most: each costs the ledger memory from its admission on."""

MAX_REASON = 2000
"""Characters of a reason that are kept."""

MAX_ORDER = 1 << 62

MAX_SIZES = 256
"""Sizes of dtypes that are kept; a client may name any number of them."""

_sizes = {"bfloat16": 2}


def check_name(what: str, name: str) -> None:
    if not name or len(name) > MAX_NAME:
        raise Invalid(f"{what} {name[:40]!r} has {len(name)} characters; expected 1 to {MAX_NAME}")


def check_names(what: str, names: Sequence[str]) -> None:
    """`check_name` of each."""
    if names and not 0 < min(map(len, names)) <= max(map(len, names)) <= MAX_NAME:
        for name in names:
            check_name(what, name)


def check_unique(what: str, names: Sequence[Hashable]) -> None:
    if len(set(names)) != len(names):
        twice = [name for name, count in Counter(names).items() if count > 1]
        raise Invalid(f"{what} given twice: {some(twice)}")


def check_tag(key: str, tag: Tag) -> None:
    """Tags are journaled and sent around: plain values only."""
    for name, value in tag.items():
        if type(value) not in (str, int, float, bool, type(None)) or (type(value) is int and abs(value) >> 63):
            check_plain(f"tag {name!r} of {key!r}", value)


def check_plain(what: str, value: object) -> int:
    """How many parts and characters it has. Raises Invalid, naming `what`, unless it is plain, and small enough."""
    return check_size(what, value, TAG_PARTS, plain=True)


def check_blocks(blocks: Sequence[Block], rows: int) -> None:
    """Each block is one column of all rows of the message, within its segment's possible bounds."""
    fields = [block.field for block in blocks]
    check_unique("field", fields)
    check_names("field", fields)
    for block in blocks:
        if block.rows != rows:
            raise Invalid(f"column {block.field!r} has {block.rows} rows, the message has {rows}")
        shape = block.shape
        if block.offset < 0 or block.nbytes < 0 or block.segment < 0 or block.digest < 0 or (shape and min(shape) < 0):
            raise Invalid(f"column {block.field!r}: negative segment, offset, size, digest or shape")
        if block.kind != "dense":
            if block.nbytes < 8 * (rows + 1):
                raise Invalid(f"column {block.field!r}: {block.nbytes} bytes cannot hold the offsets of {rows} rows")
        elif block.nbytes != math.prod(shape, start=rows * _itemsize(block)):
            raise Invalid(
                f"column {block.field!r}: {rows} rows of {block.dtype}{list(shape)} take "
                f"{math.prod(shape, start=rows * _itemsize(block))} bytes, the block has {block.nbytes}"
            )


def _itemsize(block: Block) -> int:
    size = _sizes.get(block.dtype)
    if size is None:
        try:
            dtype = np.dtype(block.dtype)
        except (TypeError, ValueError, SyntaxError):
            raise Invalid(f"column {block.field!r}: unknown dtype {block.dtype!r}") from None
        if dtype.hasobject:
            raise Invalid(f"column {block.field!r}: dtype {block.dtype!r} holds references")
        size = dtype.itemsize
        if len(_sizes) < MAX_SIZES:
            _sizes[block.dtype] = size
    return size


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
    nbytes = len(msgspec.msgpack.encode(spec.tag))
    if nbytes > MAX_GROUP_TAG:
        raise Invalid(
            f"the tag of group {spec.uid!r} takes {nbytes} bytes, the limit is {MAX_GROUP_TAG}; put it into a column"
        )


def check_task(task: TaskSpec) -> None:
    check_name("task", task.name)
    if not task.ttl > 0 or task.max_deliver < 1:
        raise Invalid(f"task {task.name!r}: ttl={task.ttl}, max_deliver={task.max_deliver}; both must be positive")
    if task.stage == "prompt" and task.fields:
        raise Invalid(f"task {task.name!r} leases prompts: there are no rows yet whose {task.fields} it could wait for")


def some(names: Sequence[object], limit: int = 5) -> str:
    """The first few names, and how many more there are."""
    text = ", ".join(repr(name) for name in islice(names, limit))
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def clipped(reason: str) -> str:
    """It is told with each change of a group."""
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."


def explain(error: QueueError, client: str, request_id: int) -> None:
    """Note on an error whose request it was."""
    if client:
        error.add_note(f"request {request_id} of {client}")
