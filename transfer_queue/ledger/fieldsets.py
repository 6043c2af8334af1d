"""Sets of fields, as numbers that fit in an array."""

from __future__ import annotations

from collections.abc import Iterable

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
        """The fields of a mask, sorted."""
        return sorted(name for i, name in enumerate(self.names) if mask >> i & 1)

    def dump(self) -> object:
        return [self.names, self.bits]

    def load(self, names: list[str], bits: list[int]) -> None:
        self.mask(names)
        for mask in bits:
            self.number(mask)
