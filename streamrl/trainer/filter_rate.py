"""How many prompts to issue for each group that shall be trained, when some of them are filtered out (DAPO)."""

from __future__ import annotations

from dataclasses import dataclass

FORGET = 0.8
"""What a step leaves of the counts before it: the rate follows the policy over about five steps."""
MOST = 4.0
"""Prompts per trained group at most, however many are filtered out: the rate is an estimate, and samples cost."""


@dataclass(slots=True)
class FilterRate:
    """The running share of filtered groups. Fed with counts since the start, at any time."""

    _kept: float = 0.0
    _filtered: float = 0.0
    _seen: tuple[int, int] = (0, 0)

    def look(self, kept: int, filtered: int) -> None:
        """`kept` groups were trained and `filtered` filtered out since the start. Once a step."""
        self._kept = FORGET * self._kept + kept - self._seen[0]
        self._filtered = FORGET * self._filtered + filtered - self._seen[1]
        self._seen = (kept, filtered)

    @property
    def share(self) -> float:
        """Of groups that are filtered out; 0 before anything is known."""
        known = self._kept + self._filtered
        return self._filtered / known if known else 0.0

    @property
    def prompts_per_group(self) -> float:
        return min(MOST, 1.0 / (1.0 - self.share)) if self.share < 1.0 else MOST
