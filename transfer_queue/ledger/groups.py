"""One prompt group, as the ledger keeps it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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

    Nearly all groups wait: before their first session, or complete. Such a group has its rows `packed` (see `_packed`)
    instead of `Sessions`: a tenth of the memory. Whoever asks for `closed`, `failures` or `open_rows` unpacks it.

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
    _kept: array[int] | Sessions = field(default_factory=lambda: _NO_ROWS)

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
        kept = self._kept
        if isinstance(kept, Sessions) and not kept.failures and not kept.open_rows:
            self._kept = _packed([each for s in sorted(kept.closed) for row in kept.closed[s] for each in (s, row)])

    def rows(self) -> list[int]:
        """Rows of the sessions that succeeded, by session."""
        kept = self._kept
        if isinstance(kept, array):
            return _rows_of(kept)
        return [row for session in sorted(kept.closed) for row in kept.closed[session]]

    def rows_of(self, session: int) -> list[int]:
        """The rows of a session, closed or not."""
        kept = self._kept
        if isinstance(kept, array):
            return [row for s, row in zip(_sessions_of(kept), _rows_of(kept), strict=True) if s == session]
        return [*kept.closed.get(session, ()), *kept.open_rows.get(session, ())]

    def row_count(self) -> int:
        """How many rows `rows` has."""
        kept = self._kept
        if isinstance(kept, array):
            return len(kept) if kept.typecode == "I" else len(kept) // 2
        return sum(map(len, kept.closed.values()))

    def all_rows(self) -> list[int]:
        """Every row that is the group's, the prompt's included."""
        kept = self._kept
        if isinstance(kept, array):
            return [self.prompt, *_rows_of(kept)]
        return [self.prompt, *chain(*kept.closed.values()), *chain(*kept.open_rows.values())]

    @property
    def suspect(self) -> bool:
        """Whether it is to be leased alone, so that the next death tells if it was the cause."""
        return self.crashes >= SUSPECT_CRASHES

    def is_closed(self, session: int) -> bool:
        kept = self._kept
        if isinstance(kept, array):
            return session in _sessions_of(kept)
        return session in kept.closed or session in kept.failures

    def succeeded(self) -> int:
        """How many sessions succeeded."""
        kept = self._kept
        return len(set(_sessions_of(kept))) if isinstance(kept, array) else len(kept.closed)

    def ended_sessions(self) -> list[int]:
        kept = self._kept
        if isinstance(kept, array):
            sessions = _sessions_of(kept)
            return list(sessions) if isinstance(sessions, range) else sorted(set(sessions))
        return sorted([*kept.closed, *kept.failures])

    def all_closed(self) -> bool:
        kept = self._kept
        return self.succeeded() + (0 if isinstance(kept, array) else len(kept.failures)) == self.n

    def take_open_rows(self) -> list[int]:
        """The rows of sessions that are not closed; the group forgets them."""
        kept = self._kept
        if isinstance(kept, array):
            return []
        rows = list(chain(*kept.open_rows.values()))
        kept.open_rows.clear()
        return rows

    def begin_again(self) -> None:
        """Without any session."""
        self._kept = _NO_ROWS

    def dump(self) -> list[Any]:
        """For `load`; its lease is not in it."""
        kept, packed, parts = self._kept, None, None
        if isinstance(kept, array):
            packed = array("i", chain(*zip(_sessions_of(kept), self.rows(), strict=True))).tobytes()
        else:
            parts = [list(d.items()) for d in (kept.closed, kept.failures, kept.open_rows)]
        return [
            self.uid, self.n, self.order, self.min_sessions, self.tag, self.prompt, self.since, self.state,
            self.attempt, self.reason, self.crashes, self.delivered, self.prompt_lost, self.step, packed, parts,
        ]  # fmt: skip

    @classmethod
    def load(cls, value: list[Any]) -> Group:
        uid, n, order, min_sessions, tag, prompt, since, state, *rest, step, packed, parts = value
        attempt, reason, crashes, delivered, prompt_lost = rest
        group = cls(
            uid, n, order, min_sessions, tag, prompt, since, _STATES[state], attempt, reason, crashes, delivered
        )
        group.prompt_lost, group.step = prompt_lost, step
        group._kept = _packed(array("i", packed).tolist()) if parts is None else Sessions(*map(dict, parts))
        return group

    def _unpacked(self) -> Sessions:
        kept = self._kept
        if not isinstance(kept, array):
            return kept
        sessions = self._kept = Sessions()
        for session, row in zip(_sessions_of(kept), _rows_of(kept), strict=True):
            sessions.closed.setdefault(session, []).append(row)
        return sessions


def _packed(pairs: list[int]) -> array[int]:
    """Session and row of each row, given by turns and by session; of type "I" the rows alone, if they are of the
    sessions 0, 1, 2, ..., as nearly always."""
    if not pairs:
        return _NO_ROWS
    rows = pairs[1::2]
    return array("I", rows) if pairs[::2] == list(range(len(rows))) else array("i", pairs)


def _sessions_of(packed: array[int]) -> Sequence[int]:
    """Of each row."""
    return range(len(packed)) if packed.typecode == "I" else packed[::2]


def _rows_of(packed: array[int]) -> list[int]:
    return packed.tolist() if packed.typecode == "I" else packed[1::2].tolist()
