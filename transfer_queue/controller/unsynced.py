"""Which records of the journal must be on the disk before what follows them may be told."""

from __future__ import annotations


class Unsynced:
    """Records of partitions of durability "journal" that no sync has covered yet, by what they changed.

    Invariants: an answer about a partition waits for the last such record that changed it, whether it still is durable,
    or is there at all; an answer or order about no partition in particular waits for the last of all.
    """

    def __init__(self) -> None:
        self._covered = 0
        self._last = 0  # of all
        self._common = 0  # that may have changed any partition
        self._partitions: dict[str, int] = {}

    def note(self, record: int, partition: str | None) -> None:
        """This record, the newest one, must be on the disk; it changed that partition, or (None) any."""
        self._last = record
        if partition is None:
            self._common = record
        else:
            self._partitions[partition] = record

    def needed(self, partition: str | None = None) -> int:
        """The record that must be on the disk before anything is told of the partition, or (None) at all; 0: it is."""
        record = self._last if partition is None else max(self._common, self._partitions.get(partition, 0))
        return record if record > self._covered else 0

    def covered(self, record: int) -> None:
        """All records up to this one are on the disk."""
        self._covered = max(self._covered, record)
        if self._covered >= self._last:
            self._partitions.clear()
