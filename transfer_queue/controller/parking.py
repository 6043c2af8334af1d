"""Requests that wait, and answers that were given: what a controller remembers of its clients' conversations."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from transfer_queue.net.messages import Admit, Fetch, Find, Lease, Lookup, Ok, Reply, SegmentRequest, Watch

KEPT_REPLIES = 256
"""Answers kept per client. A client has far fewer requests in flight."""

KEPT_CLIENTS = 4096
"""Clients whose answers are kept, those heard from last."""


Waiting = Admit | Lease | Watch | Lookup | Find | Fetch | SegmentRequest
"""The requests that may wait."""


@dataclass(slots=True, eq=False)
class Parked:
    """A request that waits in the queue `where` until `deadline`."""

    client: str
    id: int
    body: Waiting
    where: Hashable
    since: float
    deadline: float


class Parking:
    """Queues of waiting requests.

    Invariants: a queue is in order of arrival; a (client, id) waits at most once; `due` returns none that has left.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, dict[tuple[str, int], Parked]] = {}
        self._clients: dict[str, dict[int, Parked]] = {}
        self._deadlines: list[tuple[float, int, Parked]] = []
        self._ticket = itertools.count()

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key[1] in self._clients.get(key[0], ())

    def park(self, parked: Parked) -> None:
        self._queues.setdefault(parked.where, {})[parked.client, parked.id] = parked
        self._clients.setdefault(parked.client, {})[parked.id] = parked
        heapq.heappush(self._deadlines, (parked.deadline, next(self._ticket), parked))

    def queue(self, where: Hashable) -> list[Parked]:
        """Who waits there, in order of arrival."""
        return list(self._queues.get(where, {}).values())

    def anybody(self, where: Hashable) -> bool:
        """Whether anybody waits there."""
        return where in self._queues

    def leave(self, parked: Parked) -> None:
        """It waits no longer."""
        _remove(self._queues, parked.where, (parked.client, parked.id))
        _remove(self._clients, parked.client, parked.id)

    def forget_client(self, client: str) -> None:
        for parked in list(self._clients.get(client, {}).values()):
            self.leave(parked)

    def next_deadline(self) -> float | None:
        while self._deadlines:
            deadline, _, parked = self._deadlines[0]
            if self._clients.get(parked.client, {}).get(parked.id) is parked:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def due(self, now: float) -> list[Parked]:
        """Those whose deadline has come; they leave."""
        found: list[Parked] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            parked = heapq.heappop(self._deadlines)[2]
            self.leave(parked)
            found.append(parked)
        return found


class Replies:
    """The last answers to each client, so that a request that is sent again is not done again."""

    def __init__(self) -> None:
        self._clients: dict[str, dict[int, Reply]] = {}

    def get(self, client: str, request: int) -> Reply | None:
        return self._clients.get(client, {}).get(request)

    def put(self, client: str, request: int, reply: Reply) -> None:
        replies = self._clients.pop(client, None)
        if replies is None:
            replies = {}
            if len(self._clients) >= KEPT_CLIENTS:
                del self._clients[next(iter(self._clients))]
        self._clients[client] = replies
        replies[request] = _OK if isinstance(reply, Ok) else reply
        if len(replies) > KEPT_REPLIES:
            del replies[next(iter(replies))]

    def forget(self, client: str, request: int) -> None:
        """The request may be done again."""
        self._clients.get(client, {}).pop(request, None)

    def dump(self) -> Iterator[list[Any]]:
        """For `load`: sections of a snapshot, clients not heard from for longest first."""
        for client, replies in self._clients.items():
            yield [client, list(replies), [_encode(reply) for reply in replies.values()]]

    def load(self, section: list[Any]) -> None:
        """Raises ValueError for what is no answer."""
        client, requests, replies = section
        for request, reply in zip(requests, replies, strict=True):
            self.put(client, request, _decode(reply))


_OK = Ok()
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reply).decode


def _remove(table: dict[Any, dict[Any, Parked]], outer: Hashable, inner: Hashable) -> None:
    del table[outer][inner]
    if not table[outer]:
        del table[outer]
