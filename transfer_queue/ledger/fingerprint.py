"""All logical state of a ledger in one digest.

Left out is what cannot be told from outside: the numbers of rows and blocks, spare capacity, stale heap entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import xxhash

from transfer_queue.ledger.groups import Group
from transfer_queue.ledger.partition import Partition
from transfer_queue.ledger.rows import RowTable
from transfer_queue.ledger.tags import unpack

if TYPE_CHECKING:
    from transfer_queue.ledger.ledger import Ledger

_encoder = msgspec.msgpack.Encoder(order="deterministic")


def fingerprint(ledger: Ledger) -> str:
    return xxhash.xxh3_128_hexdigest(_encoder.encode(logical_form(ledger)))


def logical_form(ledger: Ledger) -> object:
    """The state as plain values."""
    leases = ledger.leases
    return {
        "life": [leases.epoch, leases.counter, ledger.run, ledger.now, ledger.serials.next],
        "leases": [
            [x.token, x.partition, x.task, x.holder, x.granted, x.deadline, sorted(x.groups)]
            for x in sorted(leases.held.values(), key=lambda x: x.token.counter)
        ],
        "segments": sorted([segment, use.nbytes, use.live, use.blocks] for segment, use in ledger.segments.use.items()),
        "partitions": {name: _partition(p) for name, p in ledger.partitions.items()},
    }


def _partition(p: Partition) -> object:
    return {
        "tasks": p.tasks,
        "credit": [p.max_groups, p.max_bytes, p.rows.puts.durability],
        "rows": {key: _row(p.rows, row) for key, row in p.rows.ids.items()},
        "consumption": p.consumption.logical_form(p.rows.order),
        "groups": {uid: _group(p.rows, group) for uid, group in p.groups.items()},
        "letters": {uid: _group(p.rows, group) for uid, group in p.letters.items()},
        "states": {state: list(groups) for state, groups in p.by_state.items()},
        "leasable": [sorted(p.pending), sorted(p.suspects), {name: sorted(queue) for name, queue in p.ready.items()}],
        "trained": {str(step): list(uids) for step, uids in p.trained.items()},
        "seen": p.seen.logical_form(),
        "changes": p.changes.logical_form(),
        "counts": [p.ended, p.dropped, p.dead, p.redelivered, p.next_order, p.incarnation, p.committed],
        "nbytes": p.rows.nbytes,
    }


def _row(rows: RowTable, row: int) -> object:
    fields = {name: rows.block_of(row, name) for name in rows.fields_of(row)}
    owner = rows.owner[row]
    serial = int(rows.order.of(row))
    return [serial, unpack(rows.tags[row]), owner.uid if owner is not None else None, fields]


def _group(rows: RowTable, group: Group) -> object:
    def keys(sessions: dict[int, list[int]]) -> dict[str, list[str]]:
        return {str(session): [rows.keys[row] for row in ids] for session, ids in sessions.items()}

    return [
        group.uid,
        group.n,
        group.order,
        group.min_sessions,
        unpack(group.tag),
        rows.keys[group.prompt],
        group.since,
        group.state,
        group.attempt,
        group.reason,
        group.crashes,
        group.delivered,
        group.prompt_lost,
        keys(group.closed),
        {str(session): why for session, why in group.failures.items()},
        keys(group.open_rows),
        group.lease.token if group.lease is not None else None,
        group.step,
    ]
