"""Whether a checkpoint holds what the verbs of a client could have put: a right digest says nothing of that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from transfer_queue.checkpoint.format import Manifest, Page, PageColumn, PartitionEntry, pages_of
from transfer_queue.errors import Corrupt, Invalid
from transfer_queue.keys import UNNAMED, check_given
from transfer_queue.ledger.checks import check_blocks, check_name, check_names, check_unique
from transfer_queue.ledger.tags import pack_all
from transfer_queue.storage.columns import read_block, storage_dtype
from transfer_queue.storage.objects import check_objects


def check(directory: Path, manifest: Manifest) -> None:
    """Every page against its digest, and all names, tags and values in it, so that nothing of a load fails later.
    Raises Corrupt."""
    path = directory / "manifest.json"
    try:
        names = [entry.name for entry in manifest.partitions]
        check_unique("partition", names)
        for name in names:
            _check_name("partition", name)
        for entry in manifest.partitions:
            path = directory / entry.file
            _check_partition(directory, entry)
    except Invalid as error:
        raise Corrupt(f"{path}: {error}; take another checkpoint") from None


def _check_partition(directory: Path, entry: PartitionEntry) -> None:
    """Keys of all pages are told apart by 64 bits of each: names alone would fill the memory of a large queue."""
    digests = []
    for page, data in pages_of(directory, entry):
        check_page(page, data)
        digests.append(np.array([xxhash.xxh3_64_intdigest(key.encode()) for key in page.keys], np.uint64))
    keys = np.concatenate(digests or [np.empty(0, np.uint64)])
    if len(keys) != entry.rows or len(np.unique(keys)) != len(keys):
        raise Invalid(f"{len(keys)} rows with {len(np.unique(keys))} keys, where the manifest says {entry.rows} rows")


def check_page(page: Page, data: np.ndarray) -> None:
    """Raises Invalid."""
    rows = len(page.keys)
    lengths = {len(page.tags), *(len(flags) for flags in page.consumed.values())}
    if lengths - {rows} or not rows:
        raise Invalid(f"a page of {rows} rows has {sorted(lengths)} tags or flags")
    check_unique("key", page.keys)
    check_names("key", page.keys)
    for key in page.keys:
        check_given("key", key)
    pack_all(page.keys, page.tags)
    for task in page.consumed:
        _check_name("task", task)
    there: dict[str, np.ndarray] = {}
    for one in page.columns:
        at = _check_column(one, rows, data)
        seen = there.setdefault(one.block.field, np.zeros(rows, bool))
        if seen[at].any() or len(np.unique(at)) != len(at):
            raise Invalid(f"field {one.block.field!r} stands twice in a row")
        seen[at] = True


def _check_column(one: PageColumn, rows: int, data: np.ndarray) -> np.ndarray:
    """The places of its rows in their page."""
    block = one.block
    _check_name("field", block.field)
    storage_dtype(block.dtype)
    check_blocks([block], block.rows)
    if block.offset + block.nbytes > len(data):
        raise Invalid(f"column {block.field!r} ends beyond its page")
    at = np.frombuffer(one.rows, np.int32) if len(one.rows) % 4 == 0 else np.asarray([-1])
    if len(at) != block.rows or not len(at) or at.min() < 0 or at.max() >= rows:
        raise Invalid(f"column {block.field!r} names rows that are not in its page")
    try:
        column = read_block(block, data[block.offset : block.offset + block.nbytes])
        if column.offsets is not None and block.kind == "object":
            if (block.dtype, tuple(block.shape)) != ("|u1", ()):
                raise Invalid(f"column {block.field!r} of objects has dtype {block.dtype!r} and shape {block.shape}")
            check_objects(column.values, column.offsets)
    except Corrupt as error:
        raise Invalid(f"column {block.field!r}: {error}") from None
    return at


def _check_name(what: str, name: str) -> None:
    """The name of something that somebody named."""
    check_name(what, name)
    if name.startswith(UNNAMED):
        raise Invalid(f"{what} {name[:40]!r} begins with a NUL; such names are the queue's own")
