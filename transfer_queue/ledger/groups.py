"""One prompt group, as the ledger keeps it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from transfer_queue.ledger.tags import pack
from transfer_queue.net.messages import GroupSpec, GroupState

if TYPE_CHECKING:
    from transfer_queue.ledger.leases import HeldLease

OUTSTANDING: tuple[GroupState, ...] = ("pending", "generating", "ready", "training")
"""States that hold credit. `trained` does not, though its rows are kept until its step is committed."""

PROMPT_LOST = "prompt lost"

SUSPECT_CRASHES = 2
"""Deaths of holders after which a group is suspected. One costs nothing yet: most deaths have nothing to do with any
group, and what the holder had in hand should not run one by one for it."""


_NO_ROWS = array("i")

_STATES: dict[str, GroupState] = {state: state for state in (*OUTSTANDING, "trained", "dead")}
"""One object for all groups in a state."""


@dataclass(slots=True)
class Sessions:
    """Rows and reasons by session; a session is in at most one of them."""

    closed: dict[int, list[int]] = field(default_factory=dict)  # session -> rows, for sessions that succeeded
    failures: dict[int, str] = field(default_factory=dict)  # session -> why
    open_rows: dict[int, list[int]] = field(default_factory=dict)  # session not closed yet -> rows so far


@dataclass(slots=True, eq=False)
class Group:
    """See `Partition` for the states and what moves a group between them.

    Nearly all groups wait: before their first session, or complete. Such a group keeps `packed`, the session and row of
    each of its rows by session, instead of `Sessions`: a tenth of the memory. Whoever asks for `closed`, `failures` or
    `open_rows` unpacks it.

    Invariants: `lease` is set exactly in the states generating and training; the prompt's row and all rows in `closed`
    and `open_rows` have this group as owner.
    """

    uid: str
    n: int
    order: int
    min_sessions: int
    tag: bytes  # packed
    prompt: int  # row id
    since: float
    state: GroupState = "pending"
    attempt: int = 0
    reason: str = ""
    crashes: int = 0  # times a holder died that held it
    delivered: int = 0  # times it was given back as poison, or its holder died holding nothing else
    prompt_lost: bool = False
    lease: HeldLease | None = None
    step: int = 0  # trained in
    packed: array[int] | None = field(default_factory=lambda: _NO_ROWS)
    _sessions: Sessions | None = None

    @classmethod
    def of(cls, spec: GroupSpec, prompt: int, now: float) -> Group:
        tag = pack(spec.uid, spec.tag)
        return cls(spec.uid, spec.n, spec.order, spec.min_sessions or spec.n, tag, prompt, now)

    @property
    def closed(self) -> dict[int, list[int]]:
        return self._unpacked().closed

    @property
    def failures(self) -> dict[int, str]:
        return self._unpacked().failures

    @property
    def open_rows(self) -> dict[int, list[int]]:
        return self._unpacked().open_rows

    def pack(self) -> None:
        """Keep it in little memory, if it has no open rows and no failures."""
        sessions = self._sessions
        if sessions is None or sessions.failures or sessions.open_rows:
            return
        pairs = [each for s in sorted(sessions.closed) for row in sessions.closed[s] for each in (s, row)]
        self.packed = array("i", pairs) if pairs else _NO_ROWS
        self._sessions = None

    def rows(self) -> list[int]:
        """Rows of the sessions that succeeded, by session."""
        if self.packed is not None:
            return self.packed[1::2].tolist()
        return [row for session in sorted(self.closed) for row in self.closed[session]]

    def all_rows(self) -> list[int]:
        """Every row that is the group's, the prompt's included."""
        if self.packed is not None:
            return [self.prompt, *self.packed[1::2]]
        return [self.prompt, *chain(*self.closed.values()), *chain(*self.open_rows.values())]

    @property
    def suspect(self) -> bool:
        """Whether it is to be leased alone, so that the next death tells if it was the cause."""
        return self.crashes >= SUSPECT_CRASHES

    def is_closed(self, session: int) -> bool:
        if self.packed is not None:
            return session in self.packed[::2]
        return session in self.closed or session in self.failures

    def succeeded(self) -> int:
        """How many sessions succeeded."""
        return len(set(self.packed[::2])) if self.packed is not None else len(self.closed)

    def ended_sessions(self) -> list[int]:
        if self.packed is not None:
            return sorted(set(self.packed[::2]))
        return sorted([*self.closed, *self.failures])

    def all_closed(self) -> bool:
        return self.succeeded() + (0 if self.packed is not None else len(self.failures)) == self.n

    def take_open_rows(self) -> list[int]:
        """The rows of sessions that are not closed; the group forgets them."""
        if self.packed is not None:
            return []
        rows = list(chain(*self.open_rows.values()))
        self.open_rows.clear()
        return rows

    def begin_again(self) -> None:
        """Without any session."""
        self.packed, self._sessions = _NO_ROWS, None

    def dump(self) -> list[Any]:
        """For `load`; its lease is not in it."""
        sessions = self._sessions
        packed = self.packed.tobytes() if self.packed is not None else None
        parts = (
            [list(d.items()) for d in (sessions.closed, sessions.failures, sessions.open_rows)] if sessions else None
        )
        return [
            self.uid, self.n, self.order, self.min_sessions, self.tag, self.prompt, self.since, self.state,
            self.attempt, self.reason, self.crashes, self.delivered, self.prompt_lost, self.step, packed, parts,
        ]  # fmt: skip

    @classmethod
    def load(cls, value: list[Any]) -> Group:
        uid, n, order, min_sessions, tag, prompt, since, state, *rest, step, packed, parts = value
        rows = _NO_ROWS if packed == b"" else None if packed is None else array("i", packed)
        attempt, reason, crashes, delivered, prompt_lost = rest
        group = cls(
            uid, n, order, min_sessions, tag, prompt, since, _STATES[state], attempt, reason, crashes, delivered
        )
        group.prompt_lost, group.step, group.packed = prompt_lost, step, rows
        if parts is not None:
            group._sessions = Sessions(*(dict(items) for items in parts))
        return group

    def _unpacked(self) -> Sessions:
        if self._sessions is None:
            sessions = self._sessions = Sessions()
            pairs = self.packed or _NO_ROWS
            for session, row in zip(pairs[::2], pairs[1::2], strict=True):
                sessions.closed.setdefault(session, []).append(row)
            self.packed = None
        return self._sessions
