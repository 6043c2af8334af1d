"""The controller without its sockets: every request goes in by `handle`, every answer and push goes out by `send`.

    client ──Request──► handle ──► ledger.apply ──► journal.append ──► send(Response)
                          │                │
                          ▼ not yet        ▼ something changed
                        parked ◄─────── wake what this change satisfies, in order of arrival

    consumes     requests (handle), deaths (client_gone), time (tick)
    produces     responses and, with id 0, pushes to units (MakeSegments, FreeSegments), both through `send`
    waits for    nothing itself. A shell must call `tick` when `next_deadline` has come, after it has handled all
                 requests that lie in its sockets: else renewals that merely queued up would come too late
    woken by     never a poll: a parked request is looked at again only when its partition or the segments changed

What a shell around it has to know:

- `client` is the identity of one client object, the same over its reconnects and never used by another one; request
  ids count per identity. A request is answered once; the same (client, id) again gets the same answer again.
- The first request of an identity is Hello, after a restart of the controller too: until then the answer to anything
  is Failed("disconnected", "say Hello first"), whereupon a client says Hello and sends its requests again, same ids.
- A unit says Hello like any client, then RegisterUnit. Each push MakeSegments is answered by one SegmentsMade, in
  order, with segments of exactly `nbytes` and ids that were never used before; it is a request and answered by Ok.
- Everything is called from one thread. An exception out of these methods is a bug or a full disk: end the process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transfer_queue.ledger import Ledger
from transfer_queue.net.messages import Request, Response
from transfer_queue.storage.journal import JournalLike

Send = Callable[[str, Response], None]


class ControllerCore:
    """See the module. Invariants:

    - A mutation is applied, then journaled, then answered; one that is refused changes nothing and is not journaled.
    - Among requests that wait for the same thing, the one that came first is served first.
    - Every parked request is answered: when it can be served, or at its deadline, or never if its client is gone.
    - A segment has at most one writer; no commit is accepted whose bytes lie in a segment its client does not hold.
    - Segments of a unit, those being made included, never exceed its budget.
    """

    def __init__(
        self, ledger: Ledger, *, send: Send, journal: JournalLike, segment_bytes: int = 8 << 20, spare_segments: int = 2,
        run: str = "", key: str = "",
    ) -> None:
        """With an empty `run` or `key`, Hello is not checked against it."""
        raise NotImplementedError

    @classmethod
    def recover(
        cls, journal_path: str | Path, *, send: Send, now: float, run: str, key: str = "", segment_bytes: int = 8 << 20,
        spare_segments: int = 2, fsync: bool = False,
    ) -> ControllerCore:
        """A core that goes on where the journal at `journal_path` ends, in a new life; makes the file if need be.

        Raises Corrupt. Clients and units must say Hello and register again.
        """
        raise NotImplementedError

    def handle(self, client: str, request: Request, now: float) -> None:
        """Take one request; it is answered through `send`, now or when it can be."""
        raise NotImplementedError

    def client_gone(self, client: str, now: float) -> None:
        """This client is dead, not just slow: its segments are sealed, its waits forgotten, and the clock leases whose
        holder is its Hello name end (unless another client of that name is there). For a unit: no new grants from it
        until it registers again; its files still serve reads."""
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Do what is due: expire leases (journaled only if there are such), end waits that ran out, ask units again."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """When `tick` should be called next; None: not before the next request."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the journal."""
        raise NotImplementedError
