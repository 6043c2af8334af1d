"""Rows by serial: what the low-level client asks for, consumes and clears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from transfer_queue.errors import Conflict, Invalid, NotFound
from transfer_queue.ledger.checks import check_name
from transfer_queue.ledger.consumption import SLICE
from transfer_queue.ledger.order import packed, unpacked
from transfer_queue.ledger.partition import Partition
from transfer_queue.ledger.queries import hidden, placed
from transfer_queue.ledger.tags import check_sizes, fitting, shown
from transfer_queue.net.messages import (
    AdoptPartitions,
    ClearPartition,
    Consume,
    FieldSchema,
    Find,
    Ok,
    ResetConsumption,
    Rows,
)

if TYPE_CHECKING:
    from transfer_queue.ledger.ledger import Ledger


# --- questions -----------------------------------------------------------------------------------------------------


def find(p: Partition, m: Find) -> Rows:
    """Rows by key, by serial, or page by page. Raises StorageKeyNotFoundError, Invalid."""
    if m.rows is not None:
        rows = p.rows.order.require(unpacked(m.rows), p.name)
    elif m.keys is not None:
        found = (p.rows.ids.get(key) for key in m.keys)
        rows = np.asarray([row for row in found if row is not None and not hidden(p, row)], np.int64)
    else:
        return _find_page(p, m)
    return describe(p, rows, m.fields, m.task, located=m.located)


def _find_page(p: Partition, m: Find) -> Rows:
    """The next rows by serial: fewer than `count` where tags are large."""
    rows = _page(p, m.after, max(0, m.count))
    here = rows[: fitting(p.rows.tags[row] for row in rows.tolist())] if m.count > 0 else rows
    found = describe(p, here, m.fields, m.task, located=m.located)
    return replace(found, more=len(here) < len(rows) or len(rows) == m.count > 0)


def _page(p: Partition, after: int, count: int) -> np.ndarray:
    """Ids of up to `count` (0: all) visible rows after a serial."""
    serials, rows = p.rows.order.after(after, count)
    if not p.groups:
        return rows
    seen: list[int] = []
    while len(rows):
        seen += [row for row in rows.tolist() if not hidden(p, row)]
        if not count or len(seen) >= count:
            break
        serials, rows = p.rows.order.after(int(serials[-1]), count)
    return np.asarray(seen[: count or None], np.int64)


def describe(
    p: Partition, rows: np.ndarray, fields: Sequence[str] | None, task: str = "", *, located: bool = False
) -> Rows:
    """These rows as an answer; fields that the partition does not have are in no row."""
    names = p.rows.fields() if fields is None else list(dict.fromkeys(fields))
    there = {name: p.rows.has(name, rows) for name in names}
    serials = p.rows.order.of(rows)
    ids = rows.tolist()
    schema = [_schema(p, name, rows, there[name]) for name in names]
    if fields is None:  # only those that some row has
        kept = [i for i, one in enumerate(schema) if one.dtype]
        schema, names = [schema[i] for i in kept], [names[i] for i in kept]
    return Rows(
        rows=packed(serials),
        keys=[p.rows.keys[row] for row in ids],
        tags=[shown(p.rows.tags[row]) for row in ids],
        schema=schema,
        have=[there[name].tobytes() for name in names],
        consumed=p.consumption.flags(task, serials, rows).tobytes() if task else b"",
        located=placed(p, rows, names) if located else None,
    )


def ready(p: Partition, task: str, fields: Sequence[str], wanted: int = 0) -> tuple[np.ndarray, np.ndarray, bool]:
    """Serials and ids of the oldest plain rows that have all the fields and that the task has not consumed: at least
    `wanted` (0: all) if there are so many. And whether there may be more."""
    found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    count = 0
    for serials, rows in p.consumption.slices(p.rows.order, task, 2 * wanted or SLICE):
        mask = np.ones(len(rows), bool)
        for name in fields:
            mask &= p.rows.has(name, rows)
        if p.groups:
            mask &= np.asarray([p.rows.owner[row] is None for row in rows.tolist()], bool)
        found.append((serials[mask], rows[mask]))
        count += len(found[-1][0])
        if wanted and count >= wanted:
            break
    else:
        wanted = 0
    serials, rows = map(np.concatenate, zip(*found, strict=True))
    return serials, rows, wanted > 0


def _schema(p: Partition, name: str, rows: np.ndarray, there: np.ndarray) -> FieldSchema:
    """By the first of the rows that has the field; without dtype if none has."""
    if not there.any():
        return FieldSchema(name, "dense", "", ())
    found = p.rows.block_of(int(rows[there.argmax()]), name)
    assert found is not None
    block, _ = found
    return FieldSchema(name, block.kind, block.dtype, block.shape)


# --- changes -------------------------------------------------------------------------------------------------------


def consume(ledger: Ledger, m: Consume, now: float) -> Rows:
    p = ledger.partition(m.partition)
    order = p.rows.order
    rows = order.require(unpacked(m.rows), p.name)
    taken = unpacked(m.taken)
    check_sizes(f"a fetch of {len(rows)} rows", (p.rows.tags[row] for row in rows.tolist()))
    remembered = {key: unpacked(serials) for key, serials in m.remember.items()}
    p.consumption.take(m.task, taken, order.find(taken))
    if remembered:
        p.consumption.remember(m.task, remembered, order)
    return describe(p, rows, m.fields, m.task)


def reset(ledger: Ledger, m: ResetConsumption, now: float) -> Ok:
    p = ledger.partition(m.partition)
    p.consumption.reset(None if m.task is None else [m.task])
    return Ok()


def clear_partition(ledger: Ledger, m: ClearPartition, now: float) -> Ok:
    """Raises NotFound for an unknown one, Conflict if groups in it are not done."""
    p = ledger.partition(m.partition)
    _check_no_groups(p, "clear it")
    p.rows.erase(list(p.rows.ids.values()))
    p.consumption.reset()
    if not p.tasks and not p.groups:
        del ledger.partitions[m.partition]
    return Ok()


def adopt(ledger: Ledger, m: AdoptPartitions, now: float) -> Ok:
    """Raises NotFound, Invalid, or Conflict if one of the partitions has groups or tasks, or not all of its rows."""
    if len(set(m.names.values())) != len(m.names):
        raise Invalid(f"two partitions cannot get one name: {sorted(m.names.values())}")
    if both := sorted(set(m.names) & set(m.names.values())):
        raise Invalid(f"{both} would be overwritten before they are adopted; load them under names that nobody gets")
    for staged, name in m.names.items():
        check_name("partition", name)
        _check_plain(ledger.partition(staged))
        if name in ledger.partitions:
            _check_plain(ledger.partitions[name])
    consumed = {
        staged: {task: unpacked(serials) for task, serials in tasks.items()} for staged, tasks in m.consumed.items()
    }
    if unknown := sorted((set(consumed) | set(m.rows)) - set(m.names)):
        raise NotFound(f"no partition among those loaded is {unknown[0]!r}")
    for staged, count in m.rows.items():
        if count != len(found := ledger.partitions[staged].rows.ids):
            raise Conflict(
                f"of the {count} rows put for partition {m.names[staged]!r} {len(found)} are there: their storage was "
                "lost, or somebody cleared what was being loaded. Nothing was changed; load again"
            )
    for staged, name in m.names.items():
        old = ledger.partitions.pop(name, None)
        if old is not None:
            old.rows.erase(list(old.rows.ids.values()))
        p = ledger.partitions.pop(staged)
        p.rename(name)
        ledger.partitions[name] = p
        for task, serials in consumed.get(staged, {}).items():
            p.consumption.take(task, serials, p.rows.order.find(serials))
    return Ok()


def _check_plain(p: Partition) -> None:
    if p.tasks or p.groups:
        raise Conflict(f"partition {p.name!r} has tasks or groups; only plain rows can be loaded over")


def _check_no_groups(p: Partition, what: str) -> None:
    if p.groups:
        raise Conflict(f"partition {p.name!r} has {len(p.groups)} groups; ack or drop them before you {what}")
