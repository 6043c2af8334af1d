"""What a tracker is, and what it is told of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Given to a tracker when it is made."""

    directory: Path
    """The run directory; its name is the run's, and stays the same when the run is resumed."""
    project: str
    config: dict[str, Any]
    """The resolved configuration, nested."""
    resumed_at: int | None = None
    """The step a resumed run was restored to: later ones are logged again. None: a new run."""

    @property
    def name(self) -> str:
        """Of letters, digits, '.', '_' and '-'."""
        return self.directory.name

    def leaves(self) -> dict[str, Any]:
        """The configuration by dotted key."""
        return dict(_leaves(self.config, ""))


class Tracker(Protocol):
    """Made as `Class(run: TrackedRun)` and called in one thread of its own, which may be slow, fail, or hang."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Finite numbers of a training step, or of a validation with the weights of `step`. Steps need not ascend: a
        validation may end after later steps, and a resumed run logs the steps after its checkpoint again."""
        ...

    def finish(self) -> None:
        """The last call, however the run ended."""
        ...


@runtime_checkable
class TakesSamples(Protocol):
    """A tracker that also shows what the model said."""

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Answers of a validation (trainer.log_val_generations): each has mode, input, output and score."""
        ...


def _leaves(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        found += _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return found
