"""What a workload is, and what the rounds of all sides gave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.bars import Bar

Round = Callable[[Any, bool, int], dict[str, float]]
"""(driver, quick, seed) -> figures: seconds, unless the name says otherwise."""


@dataclass(slots=True)
class Figures:
    """Per side and figure the value of each round. The first round is a warm-up: `median` leaves it out if it can."""

    rounds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)  # load average (1 min) before each round

    def add(self, side: str, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.rounds.setdefault(side, {}).setdefault(name, []).append(value)

    def sides(self) -> list[str]:
        return list(self.rounds)

    def median(self, side: str, name: str) -> float:
        values = self.rounds[side][name]
        return median(values[1:] or values)

    def first(self, side: str, name: str) -> float:
        return self.rounds[side][name][0]

    def has(self, side: str, name: str) -> bool:
        return name in self.rounds.get(side, {})


@dataclass(frozen=True, slots=True)
class Workload:
    """`bars` turns the figures into rows for the report; without a peer's figures it leaves the ratios out."""

    name: str
    run: Round
    bars: Callable[[Figures], list[Bar]]
    sides: tuple[str, ...] = ("ours", "peer", "memcpy")
    rounds: int = 7
