"""Answers that are kept for who asks again: without what the ledger can tell again.

An answer with tags or groups of thousands of rows, kept a few hundred times per client, would take more memory than the
rows. So `kept` leaves these out, and `again` puts them in as they are when the request comes again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from transfer_queue.ledger.consuming import describe
from transfer_queue.ledger.order import unpacked
from transfer_queue.ledger.tags import pack, shown
from transfer_queue.net.messages import Commit, Committed, Fetch, Leased, Mutation, Query, Reply, Rows

if TYPE_CHECKING:
    from transfer_queue.ledger.ledger import Ledger


def kept(reply: Reply) -> Reply:
    """What to keep of an answer."""
    match reply:
        case Committed(tags=tags) if tags:
            return replace(reply, tags=[])
        case Leased():
            return replace(reply, groups=[])
        case Rows(rows=rows):
            return Rows(rows=rows)
        case _:
            return reply


def again(ledger: Ledger, body: Mutation | Query, reply: Reply) -> Reply | None:
    """The whole answer; None if its effect is gone (a lease that has ended), so that the request may be done again.

    Raises StorageKeyNotFoundError for fetched rows that were cleared meanwhile.
    """
    if isinstance(body, Commit) and isinstance(reply, Committed) and reply.tags == []:
        return replace(reply, tags=_tags(ledger, body))
    if isinstance(reply, Leased):
        held = ledger.leases.held.get(reply.token)
        if held is None:
            return None
        p = ledger.partition(held.partition)
        return replace(reply, groups=[p.view(group) for group in held.groups.values()])
    if isinstance(body, Fetch) and isinstance(reply, Rows) and reply.rows:
        p = ledger.partition(body.partition)
        return describe(p, p.rows.order.require(unpacked(reply.rows), p.name), body.fields, body.task)
    return reply


def _tags(ledger: Ledger, m: Commit) -> list:
    """The tags of now; of rows that are gone, those that were sent."""
    p = ledger.partitions.get(m.partition)
    rows = [p.rows.ids.get(key) if p is not None else None for key in m.keys]
    sent = m.tags or [{}] * len(rows)
    return [
        shown(p.rows.tags[row] if p is not None and row is not None else pack(key, tag))
        for key, row, tag in zip(m.keys, rows, sent, strict=True)
    ]
