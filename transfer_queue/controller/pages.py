"""Long answers are made and sent in parts, so that others are served in between.

A listing of many keys, a snapshot of many groups, or the stats of many partitions, begins here with the request; the
shell calls `step` between two turns as long as there are open ones. What happens meanwhile may show in the parts that
come after it. That is harmless to a watcher: the answer bears the number at which it began, so all that happened since
is told again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from transfer_queue.net.messages import Changes, Listing, Part, QueueStats, Response

ROWS = 1024
"""Rows in one part of a listing: about half a millisecond."""

GROUPS = 256
"""Groups in one part of a snapshot: about a millisecond."""

PARTITIONS = 64
"""Partitions in one part of the stats: about two milliseconds."""


class Pages:
    """Answers under way. Invariant: a request has one; asked again (after a lost connection), it begins anew."""

    def __init__(self, send: Callable[[str, Response], None]) -> None:
        self._send = send
        self._open: dict[tuple[str, int], tuple[Iterator[Listing | Changes | QueueStats], int]] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, client: str, request: int, parts: Iterator[Listing | Changes | QueueStats]) -> None:
        self._open[client, request] = parts, 0

    def step(self) -> None:
        """Send one part of the answer that has waited longest."""
        if not self._open:
            return
        key = next(iter(self._open))
        parts, index = self._open.pop(key)
        part = next(parts, None)
        client, request = key
        self._send(client, Response(id=request, body=Part(index, part)))
        if part is not None:
            self._open[key] = parts, index + 1

    def forget_client(self, client: str) -> None:
        for key in [key for key in self._open if key[0] == client]:
            del self._open[key]
