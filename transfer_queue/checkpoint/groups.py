"""Finished prompt groups, in the form of any other checkpoint (see the package), for who begins with an empty journal.

    copy_groups ── their rows as they are now, in memory ──► write_groups ── a directory ──► load_groups

A page holds whole groups: of each the prompt's row, whose tag says how it was admitted (`_Admitted`), then its rows. A
load admits those that the queue does not know, leases them, and writes and closes their sessions, as a generator would.
So a group is either ready, or is generated again: also if the load is killed on the way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from transfer_queue.checkpoint.checking import check_page
from transfer_queue.checkpoint.format import FORMAT, Manifest, Page, PartitionEntry, find_manifest, pages_of
from transfer_queue.checkpoint.placing import prepare
from transfer_queue.checkpoint.saving import BYTES, ROWS, Present, columns_of, finish, row_bytes, write_page
from transfer_queue.clients.async_client import ATTEMPTS, QueueClient
from transfer_queue.errors import Corrupt, DeadlineExceeded, Invalid, NotFound, QueueError, SegmentGone
from transfer_queue.keys import split_row_key, try_split_row_key
from transfer_queue.ledger.checks import check_spec
from transfer_queue.net.messages import Group, GroupSpec, Leased, Located, Rows, SessionClose, Tag
from transfer_queue.storage.columns import Column, read_block

log = logging.getLogger(__name__)

FILE = "00000.rows"
HOLDER = "checkpoint"
FINISHED = ("ready", "training")
NOT_REPEATED = "failed when the checkpoint was saved"


class _Admitted(msgspec.Struct, forbid_unknown_fields=True):
    """How a group was admitted, and its sessions that ended without rows."""

    n: int
    order: int
    tag: Tag
    failed: list[int]


# --- saving ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class GroupsCopy:
    """Whole groups in memory, in their order."""

    partition: str
    uids: list[str] = field(default_factory=list)
    rows: int = 0
    nbytes: int = 0
    pages: list[tuple[Rows, list[Present]]] = field(default_factory=list)


async def copy_groups(
    client: QueueClient, partition: str, groups: Sequence[Group], *, without: Collection[str] = (),
    limit: int | None = None,
) -> GroupsCopy:  # fmt: skip
    """The rows of the finished ones of `groups` (as `watch` tells them), but for the fields `without`. Only as many of
    them, from the first on, as take about `limit` bytes; and none that ends meanwhile. Raises SegmentGone."""
    copy, left = GroupsCopy(partition), [group for group in groups if group.state in FINISHED]
    while left:
        room = BYTES if limit is None else min(BYTES, limit - copy.nbytes)
        page, taken = await _copy_page(client, partition, _first(left), without, room)
        if not taken:
            break
        left = left[taken:]
        if page is not None:
            copy.pages.append(page)
            copy.uids += [key for key in page[0].keys if try_split_row_key(key) is None]
            copy.rows += len(page[0].keys)
            copy.nbytes += sum(column.nbytes for _, column, _ in page[1])
    return copy


def _first(groups: Sequence[Group]) -> list[Group]:
    """As many as have ROWS rows together, at least one."""
    ends = np.cumsum([1 + len(group.rows) for group in groups])
    return list(groups[: max(1, int(np.searchsorted(ends, ROWS, side="right")))])


async def _copy_page(
    client: QueueClient, partition: str, groups: list[Group], without: Collection[str], room: int
) -> tuple[tuple[Rows, list[Present]] | None, int]:
    """A page of the first of `groups`, and how many of them are done with: 0 if the first has no room in `room` bytes.
    No page if none of them is there any more. A group alone may take more than BYTES."""
    gone, here = SegmentGone(f"rows of {partition!r} did not stand still"), groups
    for attempt in range(ATTEMPTS):
        found = await client.find(partition, keys=[key for group in here for key in _keys(group)], located=True)
        located, there = found.located, set(found.keys)
        whole = [group for group in here if there.issuperset(_keys(group))]
        if located is None or not whole:
            return None, len(groups)
        nbytes = dict(zip(located.keys, row_bytes(located).tolist(), strict=True))
        ends = np.cumsum([sum(nbytes[key] for key in _keys(group)) for group in whole])
        fitting = int(np.searchsorted(ends, room, side="right")) or int(room >= BYTES)
        if not fitting:
            return None, 0
        if fitting < len(here):  # ask again for these alone
            here = whole[:fitting]
            continue
        try:
            return await _read(client, found, located, here, without), groups.index(here[-1]) + 1
        except SegmentGone as error:
            gone = error
            await asyncio.sleep(min(0.5, 0.05 * attempt))
    raise gone


async def _read(
    client: QueueClient, rows: Rows, located: Located, groups: list[Group], without: Collection[str]
) -> tuple[Rows, list[Present]]:
    places = [place for place in located.places if place.field not in without]
    columns = await columns_of(client, msgspec.structs.replace(located, places=places))
    admitted = {group.uid: _admission(group) for group in groups}
    tags = [admitted.get(key, tag) for key, tag in zip(rows.keys, rows.tags, strict=True)]
    return msgspec.structs.replace(rows, tags=tags, located=None), columns


def _keys(group: Group) -> list[str]:
    return [group.uid, *(row.key for row in group.rows)]


def _admission(group: Group) -> Tag:
    succeeded = {split_row_key(row.key).session for row in group.rows}
    failed = sorted(set(group.sessions) - succeeded)
    return msgspec.structs.asdict(_Admitted(group.n, group.order, group.tag, failed))


def write_groups(copy: GroupsCopy, directory: str | PathLike[str]) -> None:
    """Blocking. The directory appears whole, synced to disk. Raises Invalid as `save` does, and OSError, naming it."""
    target, work, file = prepare(directory)
    try:
        with (work / FILE).open("wb") as out:
            pages = [write_page(out, rows, columns, {}) for rows, columns in copy.pages]
            out.flush()
            os.fsync(out.fileno())
        entry = PartitionEntry(copy.partition, FILE, copy.rows, pages)
        finish(work, target, file, Manifest(FORMAT, True, {"groups": len(copy.uids)}, [entry]))
    except OSError as error:
        if isinstance(error, QueueError):
            raise
        raise OSError(error.errno, f"the rows were not written ({error.strerror})", str(target)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        file.close()


# --- loading ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Stored:
    """A group in a page: the places of its prompt and its rows, and the newest weights that sampled it."""

    spec: GroupSpec
    failed: list[int]
    prompt: int
    rows: dict[int, list[int]] = field(default_factory=dict)
    version: float = 0


async def load_groups(
    client: QueueClient, directory: str | PathLike[str], partition: str, task: str, *, version: int | None = None
) -> list[str]:
    """Make groups of a checkpoint ready that the partition does not have, or has to generate (again); `task` leases
    prompts there. Those that are ready, leased or have ended are left alone, and those with a row whose tag
    `max_global_steps` exceeds `version`. Their uids. Raises Invalid, Corrupt, QueueFull."""
    path, manifest = find_manifest(directory)
    restored: list[str] = []
    live = await _states(client, partition)
    for entry in _of_groups(path, manifest):
        for page, data in pages_of(path, entry):
            groups = [g for g in _groups_in(path, page) if version is None or g.version <= version]
            if lacking := [g for g in groups if live.get(g.spec.uid, "pending") == "pending"]:
                _check(path, page, data)
                restored += await _restore(client, partition, task, page, data, lacking)
                live = await _states(client, partition)
    return restored


async def _states(client: QueueClient, partition: str) -> dict[str, str]:
    return {group.uid: group.state for group in (await client.watch(partition, -1)).groups}


def _of_groups(path: Path, manifest: Manifest) -> list[PartitionEntry]:
    if "groups" not in manifest.metadata:
        raise Invalid(f"{path} holds plain rows, no prompt groups; load it with load_checkpoint")
    return manifest.partitions


def _groups_in(path: Path, page: Page) -> list[_Stored]:
    """Raises Corrupt."""
    found: dict[str, _Stored] = {}
    try:
        for at, (key, tag) in enumerate(zip(page.keys, page.tags, strict=True)):
            parts = try_split_row_key(key)
            if parts is None:
                how = msgspec.convert(tag, _Admitted)
                spec = GroupSpec(key, how.n, how.order, how.n - len(how.failed), how.tag)
                check_spec(spec)
                found[key] = _Stored(spec, how.failed, at)
                continue
            group = found[parts.uid]
            group.rows.setdefault(parts.session, []).append(at)
            group.version = max(group.version, float(tag.get("max_global_steps", 0)))
        for uid, group in found.items():
            if not group.rows or sorted([*group.rows, *group.failed]) != list(range(group.spec.n)):
                raise ValueError(f"group {uid!r} is not whole")
    except (KeyError, ValueError, TypeError, Invalid) as error:
        raise Corrupt(f"{path}: a page of groups is damaged: {type(error).__name__}: {error}") from None
    return list(found.values())


def _check(path: Path, page: Page, data: np.ndarray) -> None:
    try:
        check_page(page, data)
    except Invalid as error:
        raise Corrupt(f"{path}: {error}; take another checkpoint") from None


async def _restore(
    client: QueueClient, partition: str, task: str, page: Page, data: np.ndarray, groups: list[_Stored]
) -> list[str]:
    specs = {group.prompt: group.spec for group in groups}
    for prompts, columns in _alike(page, data, specs):
        await client.admit(partition, [specs[at] for at in prompts], columns)
    states = await _states(client, partition)
    groups = [group for group in groups if states.get(group.spec.uid) == "pending"]  # the others have ended
    return await _fill(client, partition, task, page, data, groups) if groups else []


async def _fill(
    client: QueueClient, partition: str, task: str, page: Page, data: np.ndarray, groups: list[_Stored]
) -> list[str]:
    """All under one lease; one by one if that is refused, since the queue may suspect one of them."""
    uids = [group.spec.uid for group in groups]
    try:
        leased = await client.lease(partition, task, uids=uids, wait=0.0, holder=HOLDER)
    except (DeadlineExceeded, NotFound) as error:
        if len(groups) == 1:
            log.warning("group %s of a checkpoint is generated again: %s", uids[0], error)
            return []
        return [uid for group in groups for uid in await _fill(client, partition, task, page, data, [group])]
    await _put(client, partition, page, data, groups, leased)
    return uids


async def _put(
    client: QueueClient, partition: str, page: Page, data: np.ndarray, groups: list[_Stored], leased: Leased
) -> None:
    """The sessions that are not closed there."""
    closed = {group.uid: set(group.sessions) for group in leased.groups}
    closes: list[SessionClose] = []
    rows: list[int] = []
    for group in groups:
        uid = group.spec.uid
        missing = {session: at for session, at in group.rows.items() if session not in closed[uid]}
        failed = set(group.failed) - closed[uid]
        rows += [at for places in missing.values() for at in places]
        closes += [SessionClose(uid, session, [page.keys[at] for at in places]) for session, places in missing.items()]
        closes += [SessionClose(uid, session, [], NOT_REPEATED) for session in sorted(failed)]
    for alike, columns in _alike(page, data, rows):
        keys, tags = [page.keys[at] for at in alike], [page.tags[at] for at in alike]
        await client.put(partition, keys, columns, tags=tags, token=leased.token)
    await client.put(partition, [], {}, token=leased.token, closes=closes)


def _alike(page: Page, data: np.ndarray, wanted: Iterable[int]) -> Iterator[tuple[list[int], dict[str, Column]]]:
    """These rows of a page, those of the same fields in the same forms together."""
    columns: list[tuple[str, Column]] = []
    has: dict[int, dict[int, int]] = {at: {} for at in wanted}
    for number, one in enumerate(page.columns):
        block = one.block
        columns.append((block.field, read_block(block, data[block.offset : block.offset + block.nbytes])))
        for index, at in enumerate(np.frombuffer(one.rows, np.int32).tolist()):
            if at in has:
                has[at][number] = index
    together: dict[tuple[int, ...], list[int]] = {}
    for at, numbers in has.items():
        together.setdefault(tuple(numbers), []).append(at)
    for numbers, rows in together.items():
        taken: dict[str, Any] = {}
        for number in numbers:
            name, column = columns[number]
            taken[name] = column.take([has[at][number] for at in rows])
        yield rows, taken
