"""The ledger: all metadata of the queue, changed only by `apply`.

It has no clock and no randomness: the same mutations at the same times give the same ledger, and that is how a
controller comes back after its death.

    ledger.py       what can be asked and changed; one function per kind of mutation, in
    admission.py      OpenPartition, Admit
    commit.py         Commit, Clear
    consuming.py      Consume, ResetConsumption, ClearPartition, AdoptPartitions
    leasing.py        Lease, Renew, Ack, Nack, Drop, Replay, ReleaseHolder, Expire
    trainer.py        OpenTrainer, CommitStep, LoseSegments
    moving.py         Move
    queries.py      the answers to Lookup, Find, ListKeys, Watch, Stats
    partition.py    groups and the moves between their states
    dump.py         snapshots of all this; fingerprint.py, retelling.py
    telling.py      how much of it an answer holds
    rows.py places.py fieldsets.py tags.py tag_columns.py order.py consumption.py blocks.py layouts.py seen.py ready.py
    changes.py groups.py leases.py    the tables underneath
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from transfer_queue.errors import Invalid, NotFound, QueueError
from transfer_queue.keys import UNNAMED
from transfer_queue.ledger import admission, commit, consuming, leasing, moving, queries, trainer
from transfer_queue.ledger.blocks import Segments
from transfer_queue.ledger.checks import explain
from transfer_queue.ledger.fingerprint import fingerprint
from transfer_queue.ledger.leases import LeaseBook
from transfer_queue.ledger.order import Serials
from transfer_queue.ledger.partition import Partition
from transfer_queue.ledger.tags import fitting
from transfer_queue.net import messages as m


class Ledger:
    """Rows, groups, leases and credit of all partitions.

    Invariants:

    - A mutation happens as a whole or not at all: every check comes before the first change.
    - Tokens strictly increase, over all lives of the controller.
    - A (task, group) has at most one live lease, and what is written under a token is refused once its lease has ended.
    - Every admitted group is in exactly one state; once ended (dropped, dead, or trained and committed) it stays
      so, but for the dead ones that Replay names.
    - A group is leased whole: with all its rows, or for all its open sessions.
    - The live bytes of a partition are the sum over the blocks in which at least one of its rows lies.
    """

    def __init__(self, *, epoch: int = 1, change_log: int = 4096) -> None:
        """`change_log`: how many changed groups a partition remembers; a watcher further behind gets a snapshot."""
        self.run = ""
        self.partitions: dict[str, Partition] = {}
        self.segments = Segments()
        self.serials = Serials()
        self.leases = LeaseBook(epoch)
        self._change_log = change_log
        self.now = 0.0

    @property
    def epoch(self) -> int:
        """The life of the controller that new tokens carry."""
        return self.leases.epoch

    # --- changing ---------------------------------------------------------------------------------------------

    def apply(self, mutation: m.Mutation, now: float, client: str = "", request_id: int = 0) -> m.Reply:
        """Change the ledger. Raises a QueueError, with nothing changed, if the mutation is not acceptable.

        `now`: seconds of the controller's monotonic clock. `client` and `request_id` only name the request in errors.
        """
        try:
            reply = _APPLY[type(mutation)](self, mutation, now)
        except QueueError as error:
            explain(error, client, request_id)
            raise
        self.now = now
        return reply

    def _begin_life(self, life: m.Life, now: float) -> m.Ok:
        """The time in which no controller was alive counts for no lease and no age (another boot has another clock)."""
        if self.run and life.run != self.run:
            raise Invalid(f"this ledger belongs to run {self.run!r}, not to {life.run!r}")
        if life.epoch < self.epoch:
            raise Invalid(f"epoch {life.epoch} is over; this ledger is in epoch {self.epoch}")
        self.run = life.run
        for p in self.partitions.values():
            for group in p.groups.values():
                group.since += now - self.now
        self.leases.begin_life(life.epoch, now)
        return m.Ok()

    def holds_clock_leases(self, holder: str) -> bool:
        """Whether ReleaseHolder would end something."""
        return any(lease.task.bind == "clock" for lease in self.leases.of_holder(holder))

    # --- asking -----------------------------------------------------------------------------------------------

    def next_expiry(self) -> float | None:
        """When the next clock lease runs out (by Expire)."""
        return self.leases.next_due()

    def can_admit(self, admit: m.Admit, *, checked: bool = False) -> bool:
        """Whether there is credit. Raises for an admission that will never be possible. `checked`: it was asked for
        before, so that, as long as there is no credit, nothing else has to be looked at."""
        p = self.partition(admit.partition)
        if checked and not admission.may_have_credit(p, admit):
            return False
        new, _ = admission.check_admit(p, admit)
        return admission.has_credit(p, admit, len(new))

    def needs_credit(self, admit: m.Admit) -> bool:
        """Whether it names a group that is not admitted yet."""
        p = self.partition(admit.partition)
        return any(spec.uid not in p.groups and spec.uid not in p.seen for spec in admit.groups)

    def is_open(self, partition: str) -> bool:
        """Whether its tasks are declared; plain rows alone do not open a partition."""
        found = self.partitions.get(partition)
        return found is not None and bool(found.tasks)

    def is_durable(self, partition: str | None) -> bool:
        """Whether what is done in a partition (None: in any) is to be on the disk before it is answered."""
        if partition is None:
            return any(p.rows.puts.durability == "journal" for p in self.partitions.values())
        found = self.partitions.get(partition)
        return found is not None and found.rows.puts.durability == "journal"

    def can_lease(self, lease: m.Lease) -> bool:
        """Whether a lease would get something now. Raises Invalid or NotFound if it never will."""
        return leasing.can_lease(self.partition(lease.partition), lease)

    def offers(self, lease: m.Lease) -> bool:
        """Whether some holder would get something for that task now."""
        p = self.partition(lease.partition)
        return leasing.offers(p, p.task(lease.task))

    def lookup(self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None) -> m.Located:
        """Where rows lie; missing keys are left out. Raises NotFound for a partition, or a field that a row lacks."""
        return queries.lookup(self.partition(partition), keys, fields)

    def find(self, query: m.Find) -> m.Rows:
        """Rows with their serials. Raises NotFound for a partition, StorageKeyNotFoundError for serials gone."""
        return consuming.find(self.partition(query.partition), query)

    def listing(self, partition: str | None = None) -> m.Listing:
        """Keys and tags of the visible rows, of one partition or all."""
        shown = [name for name in self.partitions if not name.startswith(UNNAMED)]
        names = shown if partition is None else [partition]
        return m.Listing(partitions={name: queries.listing(self.partition(name)) for name in names})

    def listing_parts(self, partition: str | None, size: int) -> Iterator[m.Listing] | None:
        """`listing` in pieces, if it has more than `size` rows, or large tags."""
        shown = [name for name in self.partitions if not name.startswith(UNNAMED)]
        partitions = [self.partition(name) for name in (shown if partition is None else [partition])]
        if sum(len(p.rows.ids) for p in partitions) <= size:
            live = [p.rows.tags[row] for p in partitions for row in p.rows.ids.values()]
            if fitting(live) == len(live):
                return None
        pieces = [(p.name, queries.listing_parts(p, size)) for p in partitions]
        return (m.Listing(partitions={name: piece}) for name, parts in pieces for piece in parts)

    def snapshot_parts(self, partition: str, since: int, size: int) -> Iterator[m.Changes] | None:
        """`changes` in pieces, if it is a snapshot of more than `size` groups, or of large ones."""
        p = self.partition(partition)
        told = p.changes.floor <= since <= p.changes.seq
        return None if told or not queries.snapshot_is_long(p, size) else queries.snapshot_parts(p, size)

    def changes(self, partition: str, since: int) -> m.Changes:
        """Groups changed after `since`, each once with its state of now; a snapshot if that is too long ago, or -1."""
        return queries.changes(self.partition(partition), since)

    def sequence(self, partition: str) -> int:
        """The number of the last change of a group."""
        return self.partition(partition).changes.seq

    def stats(self, now: float, *, orders: bool = False, details: bool = False) -> dict[str, m.PartitionStats]:
        """Depth, bytes and ages, by partition; with `orders` also which groups are outstanding, with `details` who has
        leased them and how many rows have which field."""
        found = {name: queries.stats(p, now, orders=orders) for name, p in self.partitions.items()}
        if details:
            for name, p in self.partitions.items():
                leases = self.leases.by_holder(name, now)
                found[name] = msgspec.structs.replace(found[name], leases=leases, fields=p.rows.counts())
        return found

    def stats_parts(self, now: float, size: int, *, orders: bool = False) -> Iterator[dict[str, m.PartitionStats]]:
        """`stats` in pieces of `size` partitions, of those that there are now."""
        names = list(self.partitions)

        def part(at: int) -> dict[str, m.PartitionStats]:
            here = ((name, self.partitions.get(name)) for name in names[at : at + size])
            return {name: queries.stats(p, now, orders=orders) for name, p in here if p is not None}

        return map(part, range(0, max(1, len(names)), size))

    def situation(self, partition: str, now: float) -> str:
        """One line on how things stand, for the error of somebody who waited in vain."""
        return queries.situation(self.partition(partition), now)

    def fingerprint(self) -> str:
        """A digest over all logical state: equal for ledgers that will behave equally."""
        return fingerprint(self)

    # --- partitions -------------------------------------------------------------------------------------------

    def partition(self, name: str) -> Partition:
        """Raises NotFound."""
        try:
            return self.partitions[name]
        except KeyError:
            raise NotFound(f"no partition {name!r}; there are {sorted(self.partitions)}") from None

    def find_or_new(self, name: str) -> Partition:
        """The partition of this name, or a new one that is not in the ledger before `keep`."""
        return self.partitions.get(name) or Partition(name, self.segments, self.leases, self.serials, self._change_log)

    def keep(self, partition: Partition) -> None:
        self.partitions[partition.name] = partition


_APPLY: dict[type, Callable[[Ledger, Any, float], m.Reply]] = {
    m.OpenPartition: admission.open_partition,
    m.Admit: admission.admit,
    m.Commit: commit.commit,
    m.Clear: commit.clear,
    m.ClearPartition: consuming.clear_partition,
    m.AdoptPartitions: consuming.adopt,
    m.Consume: consuming.consume,
    m.ResetConsumption: consuming.reset,
    m.Lease: leasing.lease,
    m.Renew: leasing.renew,
    m.Ack: leasing.ack,
    m.Nack: leasing.nack,
    m.Drop: leasing.drop,
    m.Replay: leasing.replay,
    m.ReleaseHolder: leasing.release_holder,
    m.Expire: leasing.expire,
    m.OpenTrainer: trainer.open_trainer,
    m.CommitStep: trainer.commit_step,
    m.LoseSegments: trainer.lose_segments,
    m.Move: moving.move,
    m.Life: Ledger._begin_life,  # pyright: ignore[reportPrivateUsage]
}
