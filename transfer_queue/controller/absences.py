"""Storage units that are away: how long, and when that is taken for good.

registered ──its client is gone──► away since t ──registers again──► registered
                                      └── t + after: lost. Its rows are given up, their groups issued again
"""

from __future__ import annotations

UNIT_LOST_AFTER = 120.0
"""Seconds. A unit that was killed is back within two, one whose supervisor was within ten. One that comes later finds
that nothing of what it has is known any more, and removes it."""


class Absences:
    """Invariant: a unit is reported lost once per absence, and never before it was away for `after` seconds."""

    def __init__(self, after: float = UNIT_LOST_AFTER) -> None:
        self.after = after
        self._since: dict[int, float] = {}

    def left(self, unit: int, now: float) -> None:
        """It is away, or has not come yet; from the first time that this was said."""
        self._since.setdefault(unit, now)

    def back(self, unit: int) -> None:
        self._since.pop(unit, None)

    def next_due(self) -> float | None:
        return min(self._since.values()) + self.after if self._since else None

    def due(self, now: float) -> list[int]:
        """The units that are lost now; they are forgotten here."""
        lost = sorted(unit for unit, since in self._since.items() if since + self.after <= now)
        for unit in lost:
            del self._since[unit]
        return lost
