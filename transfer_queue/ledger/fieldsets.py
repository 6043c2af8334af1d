"""Sets of fields, as numbers that fit in an array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

NOTHING = 0
"""The number of the empty set."""


class FieldSets:
    """The field sets that rows of one partition have, or had. They are few, since rows come in kinds.

    Invariants: `bits[n]` is the set of number n as a bit mask over `names`; equal sets have equal numbers; numbers and
    bits are never given up.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.bits: list[int] = [0]
        self._bit: dict[str, int] = {}
        self._number: dict[int, int] = {0: NOTHING}
        self._members: dict[int, list[str]] = {}

    def bit(self, name: str) -> int:
        """The mask of one field; 0 if no row ever had it."""
        return self._bit.get(name, 0)

    def mask(self, names: Iterable[str]) -> int:
        """The mask of these fields, which become known."""
        mask = 0
        for name in names:
            bit = self._bit.get(name)
            if bit is None:
                bit = self._bit[name] = 1 << len(self.names)
                self.names.append(name)
            mask |= bit
        return mask

    def number(self, mask: int) -> int:
        number = self._number.get(mask)
        if number is None:
            number = self._number[mask] = len(self.bits)
            self.bits.append(mask)
        return number

    def members(self, mask: int) -> list[str]:
        """The fields of a mask, sorted: one list for all who ask, not to be changed."""
        found = self._members.get(mask)
        if found is None:
            found = self._members[mask] = sorted(name for i, name in enumerate(self.names) if mask >> i & 1)
        return found

    def dump(self) -> list[Any]:
        """For `load`; see dump.py."""
        return [self.names, [mask.to_bytes(len(self.names) // 8 + 1, "little") for mask in self.bits]]

    def load(self, value: list[Any]) -> None:
        names, masks = value
        self.mask(names)
        for mask in masks:
            self.number(int.from_bytes(mask, "little"))
