"""Requests that wait for their answer: what both transports have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from transfer_queue.errors import DeadlineExceeded, QueueError, QueueFull
from transfer_queue.net.argument_errors import verb_of
from transfer_queue.net.codec import error_of
from transfer_queue.net.messages import Changes, Failed, Listing, Mutation, Part, Query, QueueStats, Reply

MAX_ORPHANS = 1000
"""Requests given up whose answer may still come."""


@dataclass(slots=True, eq=False)
class Waiting:
    body: Mutation | Query
    future: asyncio.Future[Reply]
    asked: float
    timeout: float
    patience: float  # the same, while the controller says that it serves nobody
    again: bool = False  # it was sent to a controller that does not know since when it waits
    parts: list[Listing | Changes | QueueStats] = field(default_factory=list)  # of its answer, so far


class Waiters:
    """Requests without an answer, by id. Ids increase. Shared by both transports.

    One timer serves all: it is set for the first deadline that was ever asked for, looks at all when it comes, and is
    set again; a request of usual length costs none.
    """

    def __init__(self, name: str, whom: str, state: Callable[[], str]) -> None:
        """`whom` they wait for, and in which state that is, is told to those that wait too long."""
        self.name = name
        self.whom = whom
        self._state = state
        self._timer: asyncio.TimerHandle | None = None
        self.waiting: dict[int, Waiting] = {}
        self._orphans: dict[int, Mutation | Query] = {}
        self._next = 0
        self._refused = False

    def add(self, body: Mutation | Query, timeout: float, patience: float | None = None) -> tuple[int, Waiting]:
        """`timeout` and `patience` in seconds: see Waiting."""
        self._next += 1
        loop = asyncio.get_running_loop()
        waiting = Waiting(body, loop.create_future(), loop.time(), timeout, timeout if patience is None else patience)
        self.waiting[self._next] = waiting
        return self._next, waiting

    async def result(self, request: int, waiting: Waiting, on_orphan: Callable[[Any, Reply], None]) -> Reply:
        """Await the answer until its deadline. `on_orphan` gets one that came as its asker was cancelled."""
        deadline = self._deadline(waiting)
        if self._timer is None or deadline < self._timer.when():
            self._set_timer(deadline)
        try:
            return await waiting.future
        except asyncio.CancelledError:
            future = waiting.future
            if future.done() and not future.cancelled() and future.exception() is None:
                on_orphan(waiting.body, future.result())
            raise
        finally:
            if self.waiting.pop(request, None) is not None:  # cancelled or too late: the answer may still come
                self._orphans[request] = waiting.body
                while len(self._orphans) > MAX_ORPHANS:
                    del self._orphans[next(iter(self._orphans))]

    def answer(self, request: int, reply: Reply) -> Any:
        """Wake the asker; or give back the body that nobody waits for any more."""
        if isinstance(reply, Part):
            whole = self._collect(request, reply)
            if whole is None:
                return None
            reply = whole
        waiting = self.waiting.pop(request, None)
        if waiting is None:
            return self._orphans.pop(request, None)
        if waiting.future.done():
            return waiting.body
        if isinstance(reply, Failed):
            waiting.future.set_exception(error_of(self._in_all(waiting, reply)))
        else:
            waiting.future.set_result(reply)
        return None

    def _in_all(self, waiting: Waiting, failed: Failed) -> Failed:
        """A wait that ran out, with the time before the controller that tells of it was there."""
        if not waiting.again or failed.code not in (DeadlineExceeded.code, QueueFull.code):
            return failed
        waited = asyncio.get_running_loop().time() - waiting.asked
        why = f" ({waited:.1f} s in all: the controller was away or was started again meanwhile)"
        return msgspec.structs.replace(failed, message=failed.message + why)

    def _collect(self, request: int, part: Part) -> Reply | None:
        """The whole answer once its last part has come. Parts that do not follow are those of an earlier attempt."""
        waiting = self.waiting.get(request)
        if waiting is None:
            return None
        if part.index == 0:
            waiting.parts.clear()
        if part.index != len(waiting.parts):
            return None
        if part.body is None:
            return joined(waiting.parts)
        waiting.parts.append(part.body)
        return None

    def fail(self, error: QueueError) -> None:
        """All end with this error."""
        for waiting in self.waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def remaining(self, request: int) -> Mutation | Query:
        """The body to send now: what is left of its wait."""
        waiting = self.waiting[request]
        waiting.again = True
        wait = getattr(waiting.body, "wait", 0.0)
        if not wait:
            return waiting.body
        left = max(0.0, wait - (asyncio.get_running_loop().time() - waiting.asked))
        return msgspec.structs.replace(waiting.body, wait=left)

    def refused(self, refused: bool) -> None:
        """Whether the controller says, for now, that it serves nobody."""
        self._refused = refused
        if refused and self.waiting:
            self._look()

    def _deadline(self, waiting: Waiting) -> float:
        return waiting.asked + (min(waiting.timeout, waiting.patience) if self._refused else waiting.timeout)

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._look)

    def _look(self) -> None:
        """End those that have waited long enough."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        now = asyncio.get_running_loop().time()
        open_ = [waiting for waiting in self.waiting.values() if not waiting.future.done()]
        for waiting in open_:
            if self._deadline(waiting) <= now:
                what = verb_of(type(waiting.body).__name__)
                error = f"client {self.name!r} waited {now - waiting.asked:.1f} s for {self.whom} to answer {what}: "
                waiting.future.set_exception(DeadlineExceeded(error + self._state()))
        deadline = min((self._deadline(waiting) for waiting in open_ if not waiting.future.done()), default=None)
        if deadline is not None:
            self._set_timer(deadline)


def joined(parts: list[Listing | Changes | QueueStats]) -> Reply:
    """A listing, the stats, or a snapshot with its oldest groups first, from its parts."""
    if isinstance(parts[0], QueueStats):
        several = (part.partitions for part in parts if isinstance(part, QueueStats))
        return msgspec.structs.replace(parts[0], partitions={name: p for each in several for name, p in each.items()})
    if isinstance(parts[0], Changes):
        changes = [part for part in parts if isinstance(part, Changes)]
        groups = sorted(
            (group for part in changes for group in part.groups), key=lambda group: (group.order, group.uid)
        )
        return Changes(seq=changes[0].seq, groups=groups, depth=changes[-1].depth, snapshot=True)
    partitions: dict[str, dict[str, Any]] = {}
    for part in parts:
        assert isinstance(part, Listing)
        for name, rows in part.partitions.items():
            partitions.setdefault(name, {}).update(rows)
    return Listing(partitions)
