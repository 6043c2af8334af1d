"""One version and the servers that are to have it, in two phases; no I/O.

```
 prepare: each loads it aside, checks it, tells its checksum     whatever is wrong with it shows here
 commit:  those that could take it between two of their steps    a copy in memory; only a death or a hang fails it
```

Who fails in either phase is out of service until it has the current weights; the others go on. Where nobody could take
the version, nothing has changed anywhere: every server serves what it served, and the version is not published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from streamrl.weight_sync.protocol import WeightError, WeightInfo, WeightsDamaged, WeightsMissing, check_digest


@runtime_checkable
class TwoPhase(Protocol):
    """What an LLM server may offer beside `update_weights`. One that does not loads everything at its commit."""

    async def prepare_weights(self, path: str, version: int) -> str | None:
        """Load a version aside and check it, while requests go on with the one in service. Its checksum
        (weight_sync.digest); None: this kind has none to tell. The next call forgets what this one has loaded. Raises
        WeightError."""
        ...

    async def commit_weights(self, path: str, version: int) -> float | None:
        """As `update_weights`, with what `prepare_weights` has loaded if that was of the same path and version. Seconds
        in which no token was made for it; None: not known."""
        ...


async def take(server: Any, info: WeightInfo) -> None:
    """A version into one server, by both phases if it has them; not if it has read another checksum than the trainer's.
    Raises WeightError, and what else keeps it from taking it."""
    if not isinstance(server, TwoPhase):
        await server.update_weights(info.path, info.version)
        return
    check_digest(await server.prepare_weights(info.path, info.version), info)
    await server.commit_weights(info.path, info.version)


Answer = object
"""Of a server: what it returned, or the exception in its place."""


@dataclass(slots=True)
class SyncRound:
    """Invariants: only who prepared is asked to commit; who is in `missing` has not acknowledged; `refusal` is None if
    anybody could take the version."""

    digest: str
    """The trainer's; empty: not known."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why it does not have the version, by server."""
    acknowledged: tuple[str, ...] = ()
    checksums: dict[str, str] = field(default_factory=dict)
    """What servers told of what they had aside, where they can tell."""
    _refusals: list[WeightError] = field(default_factory=list)
    _alive: set[str] = field(default_factory=set)
    """Those that failed and are not dead: they serve what they served."""

    def prepared(self, answers: Mapping[str, Answer]) -> tuple[str, ...]:
        """By server the checksum of what it has aside (None: it cannot tell). Those that are to commit."""
        self.checksums |= {name: answer for name, answer in answers.items() if isinstance(answer, str)}
        for name, answer in answers.items():
            if isinstance(answer, str) and self.digest and answer != self.digest:
                answer = WeightsDamaged(f"{name} has read checksum {answer}, the trainer wrote {self.digest}")
            self._heard(name, answer)
        return self._left(answers)

    def committed(self, answers: Mapping[str, Answer]) -> None:
        for name, answer in answers.items():
            self._heard(name, answer)
        self.acknowledged = (*self.acknowledged, *self._left(answers))

    @property
    def refusal(self) -> WeightError | None:
        """The version itself is wrong: somebody refused it, and nobody took it."""
        return self._refusals[0] if self._refusals and not self.acknowledged else None

    @property
    def in_service(self) -> bool:
        """Every server in service has it: somebody does, or all are dead and come back with it."""
        return bool(self.acknowledged) or not self._alive

    @property
    def behind(self) -> dict[str, str]:
        """Those that serve older weights than the others now, and why."""
        return {name: why for name, why in self.missing.items() if name in self._alive}

    def _heard(self, name: str, answer: Answer) -> None:
        if not isinstance(answer, Exception):
            return
        self.missing[name] = str(answer) or type(answer).__name__
        if isinstance(answer, WeightError) and not isinstance(answer, WeightsMissing):
            self._refusals.append(answer)
        if not isinstance(answer, ConnectionError):
            self._alive.add(name)

    def _left(self, answers: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in answers if name not in self.missing)
