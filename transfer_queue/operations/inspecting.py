"""The command line's looks into a running queue. Each verb writes text that is safe for a terminal."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from transfer_queue.client import QueueClient
from transfer_queue.errors import Disconnected, Invalid, NotFound
from transfer_queue.net.addresses import ADDRESS_VARIABLE, DIRECTORY_VARIABLE
from transfer_queue.net.ending import is_held
from transfer_queue.net.messages import Group, QueueStats
from transfer_queue.operations.terminal import age, count, plain, size, table
from transfer_queue.service.finding import address_of
from transfer_queue.service.queue_service import read_address
from transfer_queue.storage.columns import Column

Write = Callable[[str], Any]

FIRST_ANSWER = 5.0
"""Seconds that a person waits for a queue before it is said that it does not answer."""

STATES = ("pending", "generating", "ready", "training", "trained", "dropped", "dead")


async def with_client(directory: Path | None, work: Callable[[QueueClient], Awaitable[int]]) -> int:
    """Run `work` on a client of the queue in `directory`, or of the one that the environment names."""
    client = await QueueClient.connect(_address(directory), name=f"cli-{os.getpid()}", timeout=FIRST_ANSWER)
    try:
        return await work(client)
    finally:
        await client.close()


async def stat(client: QueueClient, args: argparse.Namespace, write: Write) -> int:
    stats = await client.stats()
    if args.json:
        write(json.dumps(json.loads(msgspec.json.encode(stats)), indent=2) + "\n")
        return 0
    write(stats_text(stats))
    return 0


async def peek(client: QueueClient, args: argparse.Namespace, write: Write) -> int:
    """A row's tags, and each field with its kind and the beginning of its value."""
    names = [args.partition] if args.partition is not None else sorted((await client.stats()).partitions)
    for partition in names:
        located = await client.lookup(partition, [args.key])
        if not located.keys:
            continue
        columns = await client.read(located)
        write(f"{plain(args.key)} in {plain(partition)}\n")
        for name, value in sorted(located.tags[0].items()):
            write(f"  tag   {plain(name, 40)} = {plain(value, args.width)}\n")
        for name, column in sorted(columns.items()):
            write(f"  field {plain(name, 40)}  {_kind(column)}  {plain(_value(column), args.width)}\n")
        return 0
    raise NotFound(f"no row {plain(args.key)!r} in {', '.join(map(plain, names)) or 'an empty queue'}")


async def tail(client: QueueClient, args: argparse.Namespace, write: Write) -> int:
    """The groups that there are, then one line for each change of one."""
    partition = await _partition(client, args.partition)
    now, left = await client.watch(partition, -1, wait=0.0), args.number
    write(f"{count(len(now.groups), 'group')} in {plain(partition)}; what becomes of them follows (Ctrl-C ends)\n")
    for group in now.groups:
        write(_group_line(group))
    since = now.seq
    while True:
        changes = await client.watch(partition, since, wait=60.0)
        since = changes.seq
        for group in changes.groups:
            write(_group_line(group))
            left -= 1
            if left == 0:
                return 0


async def dead(client: QueueClient, args: argparse.Namespace, write: Write) -> int:
    partition = await _partition(client, args.partition) if args.partition is not None else None
    found = [
        [plain(name, 40), plain(uid, 60), plain(reason, 100)]
        for name, p in sorted((await client.stats()).partitions.items())
        if args.partition is None or name == partition
        for uid, reason in sorted(p.dead.items())
    ]
    write(table([["partition", "uid", "reason"], *found]) + "\n" if found else "no group ended dead\n")
    return 0


async def replay(client: QueueClient, args: argparse.Namespace, write: Write) -> int:
    partition = await _partition(client, args.partition)
    await client.replay(partition, args.uids)
    write(f"pending again in {plain(partition)}: {count(len(args.uids), 'group')}\n")
    return 0


def how_to_connect(directory: Path, address: dict[str, str]) -> str:
    """What `serve` prints."""
    lines = [
        f"queue {address['run']} in {directory}",
        f"  shell    export TQ_DIRECTORY={shlex.quote(f'{directory}')}",
        f"  or       export TQ_ADDRESS={shlex.quote(json.dumps(address))}",
        "  python   import transfer_queue as tq; tq.init(); tq.kv_list()",
        f"  look     python -m transfer_queue stat -q {directory}",
    ]
    if "network" in address:
        lines += [
            f"  network  {address['network']} (CURVE)",
            f"  there    copy {address['key_file']} to the same path, mode 0600, and export TQ_ADDRESS as above",
        ]
    return "\n".join(lines) + "\n"


def stats_text(stats: QueueStats) -> str:
    parts = [f"epoch {stats.epoch}, {count(stats.clients, 'client')}"]
    heading = ["partition", "rows", "bytes", *STATES, "oldest"]
    rows = []
    for name, p in sorted(stats.partitions.items()):
        oldest = max(p.oldest_age.values(), default=None)
        counts = [str(p.depth.get(state, 0)) for state in STATES]
        rows.append([plain(name, 40), str(p.rows), size(p.nbytes), *counts, "-" if oldest is None else age(oldest)])
    parts.append(table([heading, *rows]) if rows else "no partitions")
    units = [
        [str(u.unit), "serves" if u.alive else "away", size(u.used), size(u.budget), size(u.spilled), str(u.segments)]
        for u in stats.units
    ]
    parts.append(
        table([["unit", "state", "held", "budget", "on disk", "segments"], *units]) if units else "no storage units"
    )
    if units:
        live = size(sum(p.nbytes for p in stats.partitions.values()))
        parts.append(f"held, on disk: whole segments, also spare and half-written ones; {live} of them are live rows")
    if stats.no_room:
        told = plain(stats.first_without_room, 1000)
        parts.append(f"{count(stats.no_room, 'writer')} without room, the first: {told}")
    return "\n\n".join(parts) + "\n"


def _address(directory: Path | None) -> dict[str, str]:
    """Raises Invalid or Disconnected, saying what to give."""
    if directory is not None:
        return _running(directory)
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named and not os.environ.get(ADDRESS_VARIABLE):
        return _running(Path(named))
    if not named and not os.environ.get(ADDRESS_VARIABLE):
        raise Invalid("which queue? give its directory (-q), or set TQ_DIRECTORY (or TQ_ADDRESS)")
    return address_of(None)


def _running(directory: Path) -> dict[str, str]:
    address = read_address(directory)
    if not is_held(directory / "service.lock"):
        raise Disconnected(f"the queue in {directory} does not run; `serve {directory}` starts it again")
    return address


async def _partition(client: QueueClient, name: str | None) -> str:
    """The one that was named, or the only one."""
    names = sorted((await client.stats()).partitions)
    if name is None and len(names) == 1:
        return names[0]
    if not names:
        raise Invalid("the queue has no partition yet")
    if name not in names:
        what = f"no partition {plain(name)!r}" if name is not None else "which partition? give it (-p NAME)"
        raise Invalid(f"{what}; there are {', '.join(map(plain, names))}")
    return name


def _group_line(group: Group) -> str:
    rows = f", {len(group.rows)} rows" if group.rows else ""
    why = f", {plain(group.reason, 100)}" if group.reason else ""
    return f"{plain(group.uid, 60)}  {group.state}, attempt {group.attempt}{rows}{why}\n"


def _kind(column: Column) -> str:
    shape = ",".join(map(str, column.shape))
    return {"dense": f"{column.dtype}[{shape}]", "ragged": f"{column.dtype}[n,{shape}]".replace(",]", "]")}.get(
        column.kind, "object"
    )


def _value(column: Column) -> str:
    (value,) = column.rows_list()
    return " ".join(str(value).split()) if column.kind != "object" else value if isinstance(value, str) else repr(value)
