"""Partitions that loads of checkpoints fill: whose they are, so that what a killed load has put goes with its client.

nobody ──filled──► its client's ──adopted, or cleared──► nobody
                        └── the client is gone: to be cleared
found after a restart ──filled again──► its client's
                └── nobody did so for `after` seconds: to be cleared
"""

from __future__ import annotations

from collections.abc import Iterable

from transfer_queue.keys import LOADING

FORGET_AFTER = 60.0
"""Seconds. Clients are back within some seconds after the controller is; a load waits no longer between two puts, as
long as there is room."""


class Loads:
    """Invariant: a partition has an owner, or is an orphan, or neither; never both."""

    def __init__(self, after: float = FORGET_AFTER) -> None:
        self.after = after
        self._filled: dict[str, dict[str, None]] = {}  # client -> partitions
        self._owner: dict[str, str] = {}
        self._orphans: dict[str, float] = {}  # partition -> since when

    def found(self, partitions: Iterable[str], now: float) -> None:
        """These were there before this life of the controller; whose they are will show."""
        self._orphans |= {name: now for name in partitions if name.startswith(LOADING)}

    def filled(self, partition: str, client: str) -> None:
        """It is the client's who put to it last."""
        self.ended([partition])
        self._owner[partition] = client
        self._filled.setdefault(client, {})[partition] = None

    def ended(self, partitions: Iterable[str]) -> None:
        """There are no such partitions any more."""
        for name in partitions:
            self._orphans.pop(name, None)
            owner = self._owner.pop(name, None)
            if owner is not None:
                del self._filled[owner][name]
                if not self._filled[owner]:
                    del self._filled[owner]

    def left(self, client: str) -> list[str]:
        """What a client leaves behind; it is forgotten here."""
        names = list(self._filled.get(client, ()))
        self.ended(names)
        return names

    def next_due(self) -> float | None:
        return min(self._orphans.values()) + self.after if self._orphans else None

    def due(self, now: float) -> list[str]:
        """Orphans whom nobody wants; they are forgotten here."""
        names = [name for name, since in self._orphans.items() if since + self.after <= now]
        self.ended(names)
        return names
