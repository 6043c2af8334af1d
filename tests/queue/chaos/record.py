"""What clients know, kept apart from the queue: what they tried to write, and what was acknowledged.

It outlives the clients, as a file with fsync would. All judgements (lost? twice? other bytes?) are made from it alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LATE = 2.0
"""Seconds after the death of a client in which what it had sent may still take effect."""


@dataclass
class Attempt:
    """One write of one thing. `digest` None: it was removed. Without `end` its outcome is not known (yet)."""

    digest: str | None
    begin: float
    end: float | None = None
    outcome: str = "unknown"  # acknowledged | refused | unknown


class Register:
    """The attempts to write one key or session, and what may be read of it."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []

    def begin(self, digest: str | None, now: float) -> Attempt:
        self.attempts.append(Attempt(digest, now))
        return self.attempts[-1]

    def acknowledged(self) -> bool:
        return any(attempt.outcome == "acknowledged" for attempt in self.attempts)

    def allowed(self, now: float) -> set[str | None]:
        """The digests that may stand there: no attempt that was surely followed by an acknowledged one."""
        likely = [a for a in self.attempts if a.outcome != "refused"]
        acknowledged = [a for a in likely if a.outcome == "acknowledged"]
        found: set[str | None] = {
            a.digest for a in likely if not any(b.begin > (a.end if a.end is not None else now) for b in acknowledged)
        }
        return found if acknowledged else found | {None}


class ClientRecord:
    """See the module."""

    def __init__(self) -> None:
        self.groups: dict[str, int] = {}  # admitted, acknowledged: uid -> sessions
        self.prompts: dict[str, str] = {}  # uid -> digest of what is written under it by every attempt
        self.registers: dict[Hashable, Register] = {}
        self.tokens: set[tuple[int, int]] = set()
        self.acked: dict[int, list[str]] = {}  # by step, of the trainer's present life and those before
        self.checkpoint = 0
        self.final: set[str] = set()  # trained in a step that a checkpoint has passed
        self.batches: list[tuple[int, list[str]]] = []
        self.reads = 0

    def register(self, name: Hashable) -> Register:
        return self.registers.setdefault(name, Register())

    def granted(self, token: Any) -> None:
        pair = token.epoch, token.counter
        assert pair not in self.tokens, f"I4: token {pair} was granted twice"
        self.tokens.add(pair)

    def delivered(self, uids: Sequence[str]) -> None:
        again = self.final & set(uids)
        assert not again, f"I1: {sorted(again)} were trained and passed by a checkpoint, and are delivered again"

    def trained(self, step: int, uids: Sequence[str]) -> None:
        self.acked.setdefault(step, []).extend(uids)

    def checkpointed(self, step: int) -> None:
        """On disk, before the queue is told."""
        for done in sorted(s for s in self.acked if s <= step):
            uids = self.acked.pop(done)
            assert not self.final & set(uids), f"{self.final & set(uids)} trained twice"
            self.final.update(uids)
            self.batches.append((done, uids))
        self.checkpoint = step

    def restored(self) -> int:
        """A trainer begins at the last checkpoint: what was acked after it is void."""
        self.acked.clear()
        return self.checkpoint


def digest(*values: Any) -> str:
    """Of arrays and objects, by this module's own means."""
    hashed = hashlib.blake2b(digest_size=12)
    for value in values:
        if isinstance(value, np.ndarray):
            hashed.update(str((value.dtype.str, value.shape)).encode())
            hashed.update(np.ascontiguousarray(value).tobytes())
        else:
            hashed.update(repr(value).encode())
    return hashed.hexdigest()
