"""Which sessions a step trained: the batch log read beside the events, and the sessions that wait to be trained."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.monitor.trace.tracks import Place
from streamrl.trainer.batch_log import BatchLine, batch_lines

GROUPS = 20_000
"""Groups that are remembered until they are trained; the oldest leave. Far more than a queue has credit for."""


class TrainedGroups:
    """The groups of one step after the other, in the order in which they were trained, undone ones included.

    Reads forward only. A start of the trainer that goes on from step k has the line {"resume": k} before its steps.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: Iterator[BatchLine] = batch_lines(path)
        self._next: BatchLine | None = next(self._lines, None)
        self._started = True

    def restarted(self) -> None:
        """The steps to come are those of another start."""
        self._started = True

    def of(self, step: int) -> list[str]:
        """The uids that this step trained; none if the log does not tell. Raises DamagedFileError."""
        if self._started:
            self._started = False
            self._find_start(step)
        while (line := self._next) is not None and line.resume is None:
            if line.step is not None and line.step > step:
                break
            self._next = next(self._lines, None)
            if line.step == step:
                return line.uids
        return []

    def _find_start(self, step: int) -> None:
        """Go on behind the next start from the step before; stay, where there is none (its events are not whole)."""
        line = self._next
        while line is not None and line.resume != step - 1:
            line = next(self._lines, None)
        if line is not None:
            self._next = next(self._lines, None)
        else:  # the first line of this step, from the beginning
            self._lines = batch_lines(self._path)
            self._next = next((line for line in self._lines if line.step == step), None)


TRAINED = 2_000
"""Groups that are remembered after that: those of the steps that a resume may undo."""


@dataclass(frozen=True, slots=True)
class Generated:
    """A session that ended well, and (outside of the range that is written) the slices that are to be written if a step
    of the range trained it."""

    place: Place
    unwritten: list[dict[str, Any]] = field(default_factory=list)


class Awaiting:
    """Sessions by group, until the group is trained or dropped; and a while longer, as a resume may train it again."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, list[Generated]] = OrderedDict()
        self._trained: OrderedDict[str, list[Generated]] = OrderedDict()

    def add(self, uid: str, session: Generated) -> None:
        self._groups.setdefault(uid, []).append(session)
        if len(self._groups) > GROUPS:
            self._groups.popitem(last=False)

    def trained(self, uid: str) -> list[Generated]:
        """The sessions of a group that is trained now."""
        sessions = self._groups.pop(uid, None) or self._trained.pop(uid, [])
        self._trained[uid] = sessions
        if len(self._trained) > TRAINED:
            self._trained.popitem(last=False)
        return sessions

    def dropped(self, uid: str) -> None:
        self._groups.pop(uid, None)
