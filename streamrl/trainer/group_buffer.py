"""The groups of one partition as its change log tells them: a view, and what can be concluded from it. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from transfer_queue.net.messages import Changes, Group

LIVE = ("pending", "generating", "ready", "training")

FIRST_GROUPS = 8
"""When so many groups failed with the same type of error, and no session ever succeeded, the code is broken."""


def kind_of(group: Group) -> str:
    """The type of the error with which a group failed."""
    return group.reason.removeprefix("failed: ").partition(":")[0]


@dataclass(slots=True)
class GroupBuffer:
    """Live groups of one partition as the change log tells them.

    Invariants: a group is here iff its last told state is live; `take` never returns a group twice before the
    queue told that it is ready again; groups leave oldest dispatch order first; no token of a group that is not ready
    is of an older version than `begun` says.
    """

    groups: dict[str, Group] = field(default_factory=dict)
    depth: dict[str, int] = field(default_factory=dict)
    seq: int = -1
    failed_in_a_row: int = 0
    kinds: set[str] = field(default_factory=set)
    """Types of the errors of the first groups, as long as all of them failed."""
    succeeded: bool = False
    """Whether any group ever became ready."""
    in_service: int = 0
    """A version that was in service before the last news."""
    begun: dict[str, int] = field(default_factory=dict)
    """By live group: see the invariants. The queue knows no versions, so it is concluded from the order of its news."""
    _taken: set[str] = field(default_factory=set)
    _acked: dict[str, int] = field(default_factory=dict)
    lost_prompts: dict[str, Group] = field(default_factory=dict)
    place: dict[str, int] = field(default_factory=dict)
    """Of groups whose order was decided elsewhere (a replay)."""

    def apply(self, changes: Changes) -> list[Group]:
        """Fold one answer of `watch` into the view; the groups that left untrained (dropped, dead), with the rows that
        they had if they were ready."""
        left: list[Group] = []
        newest = self.in_service
        if changes.snapshot:
            self.groups.clear()
            self._taken.clear()
            newest = max([newest, *self._acked.values()])  # it tells of live groups alone
            self._acked.clear()
        for group in changes.groups:
            self._taken.discard(group.uid)
            self.lost_prompts.pop(group.uid, None)
            newest = max(newest, self._acked.pop(group.uid, newest))
            if group.state in LIVE:
                self.groups[group.uid] = group
                # A new one was admitted after the news before these. One without a closed session was leased last, and
                # changes come in order: after what came before it here.
                leased = group.state == "generating" and not group.sessions and not changes.snapshot
                self.begun[group.uid] = newest if leased else self.begun.get(group.uid, self.in_service)
                if group.state == "pending" and group.reason == "prompt lost":
                    self.lost_prompts[group.uid] = group
                elif group.state == "ready":
                    self.failed_in_a_row, self.succeeded = 0, True
                continue
            before = self.groups.pop(group.uid, group)
            self.begun.pop(group.uid, None)
            if group.state in ("dropped", "dead"):
                left.append(replace(group, rows=before.rows))
                failed = group.state == "dead" or group.reason.startswith("failed")
                self.failed_in_a_row += failed
                if failed and not self.succeeded:
                    self.kinds.add(kind_of(group))
        self.depth = dict(changes.depth)
        self._in_service_now(newest)
        self.seq = changes.seq
        return left

    def will_be_trained(self, uids: Iterable[str], version: int) -> None:
        """These are about to be acked, and `version` is in service. So what is still pending when the queue tells that
        they are trained was begun by no older version."""
        self._acked |= dict.fromkeys(uids, version)

    def has_token_of(self, uid: str, version: int) -> None:
        """A session of the group that is closed has a token of `version`."""
        self.begun[uid] = min(version, self.begun.get(uid, version))

    def _in_service_now(self, version: int) -> None:
        if version == self.in_service:
            return
        self.in_service = version
        pending = [group for group in self.groups.values() if group.state == "pending"]
        if len(pending) > self.depth.get("pending", 0):  # the answer did not tell all: some have been begun since
            return
        for group in pending:
            if not group.sessions:  # else it was given back, and keeps what is closed
                self.begun[group.uid] = version

    @property
    def all_failed_alike(self) -> bool:
        """Whether the first groups, FIRST_GROUPS or more, failed with the same type of error."""
        return not self.succeeded and self.failed_in_a_row >= FIRST_GROUPS and len(self.kinds) == 1

    def ready(self) -> list[Group]:
        """Ready groups that are not taken, oldest dispatch order first."""
        found = [g for g in self.groups.values() if g.state == "ready" and g.uid not in self._taken]
        return sorted(found, key=lambda g: (self.place.get(g.uid, 0), g.order))

    def waiting(self) -> list[Group]:
        """Groups still being generated, oldest dispatch order first."""
        growing = (g for g in self.groups.values() if g.state in ("pending", "generating") and g.uid not in self._taken)
        return sorted(growing, key=lambda g: g.order)

    def coming(self, credit: int) -> list[Group]:
        """Groups that have been begun and whose end comes without anything being trained first, oldest dispatch order
        first. After a restart more may be out than `credit`; the queue has only the oldest of them generated."""
        oldest = sorted(group.order for group in self.groups.values())[:credit]
        begun = [g for g in self.waiting() if g.state == "generating" or g.sessions]
        return [g for g in begun if g.state == "generating" or (oldest and g.order <= oldest[-1])]

    def forget(self, uids: Iterable[str]) -> None:
        """These were leased or dropped by us; wait for the queue to speak of them again."""
        self._taken.update(uids)
