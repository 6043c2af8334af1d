"""One prompt group, as the ledger keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from transfer_queue.net.messages import GroupSpec, GroupState, Tag

if TYPE_CHECKING:
    from transfer_queue.ledger.leases import HeldLease

OUTSTANDING: tuple[GroupState, ...] = ("pending", "generating", "ready", "training")
"""States that hold credit. `trained` does not, though its rows are kept until its step is committed."""

PROMPT_LOST = "prompt lost"

SUSPECT_CRASHES = 2
"""Deaths of holders after which a group is suspected. One costs nothing yet: most deaths have nothing to do with any
group, and what the holder had in hand should not run one by one for it."""


@dataclass(slots=True, eq=False)
class Group:
    """See `Partition` for the states and what moves a group between them.

    Invariants: a session is in at most one of `closed`, `failures` and `open_rows`; `lease` is set exactly in the
    states generating and training; the prompt's row and all rows in `closed` and `open_rows` have this group as owner.
    """

    uid: str
    n: int
    order: int
    min_sessions: int
    tag: Tag
    prompt: int  # row id
    since: float
    state: GroupState = "pending"
    attempt: int = 0
    reason: str = ""
    crashes: int = 0  # times a holder died that held it
    delivered: int = 0  # times it was given back as poison, or its holder died holding nothing else
    prompt_lost: bool = False
    closed: dict[int, list[int]] = field(default_factory=dict)  # session -> rows, for sessions that succeeded
    failures: dict[int, str] = field(default_factory=dict)  # session -> why
    open_rows: dict[int, list[int]] = field(default_factory=dict)  # session not closed yet -> rows so far
    lease: HeldLease | None = None
    step: int = 0  # trained in

    @classmethod
    def of(cls, spec: GroupSpec, prompt: int, now: float) -> Group:
        return cls(spec.uid, spec.n, spec.order, spec.min_sessions or spec.n, spec.tag, prompt, now)

    def rows(self) -> list[int]:
        """Rows of the sessions that succeeded, by session."""
        return [row for session in sorted(self.closed) for row in self.closed[session]]

    def all_rows(self) -> list[int]:
        """Every row that is the group's, the prompt's included."""
        return [self.prompt, *chain(*self.closed.values()), *chain(*self.open_rows.values())]

    @property
    def suspect(self) -> bool:
        """Whether it is to be leased alone, so that the next death tells if it was the cause."""
        return self.crashes >= SUSPECT_CRASHES

    def is_closed(self, session: int) -> bool:
        return session in self.closed or session in self.failures

    def ended_sessions(self) -> list[int]:
        return sorted([*self.closed, *self.failures])

    def all_closed(self) -> bool:
        return len(self.closed) + len(self.failures) == self.n

    def take_open_rows(self) -> list[int]:
        """The rows of sessions that are not closed; the group forgets them."""
        rows = list(chain(*self.open_rows.values()))
        self.open_rows.clear()
        return rows
