"""The ledger: all metadata of the queue, changed only by `apply`.

It has no clock and no randomness: the same mutations with the same times give the same ledger, which is how a
controller comes back after its death.
"""

from __future__ import annotations

from collections.abc import Sequence

from transfer_queue.net.messages import (
    Admit, Changes, Lease, Listing, Located, Mutation, PartitionStats, Reply,
)


class Ledger:
    """See the module."""

    def __init__(self, *, epoch: int = 1, change_log: int = 4096) -> None:
        """`change_log`: how many groups' changes a partition remembers for watchers, before they get a snapshot."""
        raise NotImplementedError

    def apply(self, mutation: Mutation, now: float, client: str = "", request_id: int = 0) -> Reply:
        """Change the ledger. Raises a QueueError, with nothing changed, if the mutation is not acceptable."""
        raise NotImplementedError

    def next_expiry(self) -> float | None:
        """When the next clock lease runs out (by Expire)."""
        raise NotImplementedError

    def can_admit(self, admit: Admit) -> bool:
        """Whether there is credit. Raises Invalid or NotFound for an admission that will never be possible."""
        raise NotImplementedError

    def can_lease(self, lease: Lease) -> bool:
        """Whether a lease would get something now. Raises Invalid or NotFound if it never will."""
        raise NotImplementedError

    def lookup(self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None) -> Located:
        """Where rows lie. Raises NotFound for a partition, or a field that one of the rows lacks."""
        raise NotImplementedError

    def list(self, partition: str | None = None) -> Listing:
        """Keys and tags of all visible rows."""
        raise NotImplementedError

    def changes(self, partition: str, since: int) -> Changes:
        """Groups changed after `since`, each once with its state of now; a snapshot if that is too long ago."""
        raise NotImplementedError

    def sequence(self, partition: str) -> int:
        """The number of the last change of a group."""
        raise NotImplementedError

    def stats(self, now: float) -> dict[str, PartitionStats]:
        """Depth, bytes and ages, by partition."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """A digest over all logical state: equal for ledgers that will behave equally."""
        raise NotImplementedError
