"""Leases that are held, and when they run out."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from transfer_queue.ledger.groups import Group
from transfer_queue.net.messages import HolderStats, TaskSpec, Token


@dataclass(slots=True, eq=False)
class HeldLease:
    """Groups that one holder has for one task under one token. Invariant: never without groups."""

    token: Token
    partition: str
    task: TaskSpec
    holder: str
    granted: float
    deadline: float | None  # None: bound to the trainer's incarnation
    groups: dict[str, Group] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether its holder may get no other clock lease meanwhile."""
        return any(group.suspect for group in self.groups.values())


class LeaseBook:
    """All leases held, of all partitions.

    Invariants: a token is in the book exactly while a group is leased under it; a group is in at most one lease; tokens
    strictly increase in the order of granting.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.counter = 0
        self.held: dict[Token, HeldLease] = {}
        self.idled = False
        """A holder gave up its last clock lease: it may now get what it could not before, in any partition."""
        self._by_holder: dict[str, dict[Token, HeldLease]] = {}
        self._due: list[tuple[float, int, Token]] = []

    def grant(self, partition: str, task: TaskSpec, holder: str, groups: list[Group], now: float) -> HeldLease:
        self.counter += 1
        token = Token(self.epoch, self.counter)
        lease = HeldLease(token, partition, task, holder, now, None, {group.uid: group for group in groups})
        self.held[token] = lease
        self._by_holder.setdefault(holder, {})[token] = lease
        for group in groups:
            group.lease = lease
        self.renew(lease, now)
        return lease

    def restore(
        self, token: Token, partition: str, task: TaskSpec, holder: str, groups: list[Group], granted: float,
        deadline: float | None,
    ) -> None:  # fmt: skip
        """Put back a lease as it was held when a snapshot was taken."""
        lease = HeldLease(token, partition, task, holder, granted, deadline, {group.uid: group for group in groups})
        self.held[token] = lease
        self._by_holder.setdefault(holder, {})[token] = lease
        for group in groups:
            group.lease = lease
        if deadline is not None:
            heapq.heappush(self._due, (deadline, token.counter, token))

    def by_holder(self, partition: str, now: float) -> list[HolderStats]:
        """Who has leased how many groups of a partition for which task, and since when."""
        found: dict[tuple[str, str], tuple[int, float]] = {}
        for lease in self.held.values():
            if lease.partition == partition:
                groups, granted = found.get((lease.task.name, lease.holder), (0, now))
                held = groups + len(lease.groups), min(granted, lease.granted)
                found[lease.task.name, lease.holder] = held
        return [HolderStats(*key, groups, now - granted) for key, (groups, granted) in sorted(found.items())]

    def renew(self, lease: HeldLease, now: float) -> None:
        """A full ttl from `now`, if it is a clock lease."""
        if lease.task.bind == "clock":
            lease.deadline = now + lease.task.ttl
            heapq.heappush(self._due, (lease.deadline, lease.token.counter, lease.token))

    def end(self, group: Group) -> None:
        """The group is no longer leased; the lease ends with its last group."""
        lease = group.lease
        if lease is None:
            return
        group.lease = None
        del lease.groups[group.uid]
        if not lease.groups:
            del self.held[lease.token]
            of_holder = self._by_holder[lease.holder]
            del of_holder[lease.token]
            if not of_holder:
                del self._by_holder[lease.holder]
            self.idled |= self.first_clock(lease.holder) is None

    def of_holder(self, holder: str) -> list[HeldLease]:
        """In the order of granting."""
        return list(self._by_holder.get(holder, {}).values())

    def first_clock(self, holder: str) -> HeldLease | None:
        """The oldest clock lease of a holder. One that is `alone` is the only one."""
        held = self._by_holder.get(holder, {}).values()
        return next((lease for lease in held if lease.task.bind == "clock"), None)

    def next_due(self) -> float | None:
        """When the next clock lease runs out."""
        while self._due:
            deadline, _, token = self._due[0]
            lease = self.held.get(token)
            if lease is not None and lease.deadline == deadline:
                return deadline
            heapq.heappop(self._due)
        return None

    def due(self, now: float) -> list[HeldLease]:
        """The clock leases whose deadline has come, the earliest first."""
        found: dict[Token, HeldLease] = {}
        while (deadline := self.next_due()) is not None and deadline <= now:
            token = heapq.heappop(self._due)[2]
            found[token] = self.held[token]
        return list(found.values())

    def begin_life(self, epoch: int, now: float) -> None:
        """The controller was away: tokens of the new epoch from now on, and a full ttl for every clock lease."""
        self.epoch = epoch
        self._due.clear()
        for lease in self.held.values():
            self.renew(lease, now)
