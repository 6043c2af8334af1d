"""The trainer's view of what is ready: fed by `watch`, never by polling.

    queue ──watch──► GroupBuffer (state by uid) ──choose──► lease ──► LeasedBatch
                          │ too old, or all its scores are equal
                          └────────► drop: credit returns at once, the feeder issues one more prompt

What can no longer be trained is dropped the moment that is known, also while the trainer trains, and also a group that
is still being generated (its agent worker is told). The decisions are `Selection` and `staleness`; `GroupBuffer` is
the view; this is the shell around them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from streamrl.monitor.events import EventLog
from streamrl.trainer.giving_up import GivingUp
from streamrl.trainer.group_buffer import GroupBuffer
from streamrl.trainer.selection import FILTERED, Selection
from streamrl.trainer.staleness import Room
from streamrl.trainer.stalls import look_at
from transfer_queue.client import QueueClient
from transfer_queue.errors import DeadlineExceeded, NotFound
from transfer_queue.keys import row_key
from transfer_queue.net.messages import Changes, Group, Token

log = logging.getLogger(__name__)

CANCELLED = "cancelled: too old before its last session ended"
"""Reason of a group that was dropped while it was being generated."""

Lack = Literal["wait_data", "wait_order"]
"""Why nothing can be leased: too few groups are ready; or those that are have to wait for others."""


@dataclass(frozen=True, slots=True)
class LeasedBatch:
    """Whole groups under one training lease."""

    token: Token
    groups: list[Group]

    @property
    def uids(self) -> list[str]:
        return [group.uid for group in self.groups]


class ReplayBuffer:
    """Consumes: the queue's change log. Produces: leased batches. Waits for: ready groups. Woken by: `watch`."""

    def __init__(
        self,
        client: QueueClient,
        partition: str,
        *,
        selection: Selection,
        events: EventLog,
        per_step: int = 1,
        in_order: bool = False,
        stall_timeout: float = 300.0,
        holder: str = "trainer",
        max_failed: int = 64,
        max_filtered: int = 0,
        on_left: Callable[[list[Group]], None] = lambda groups: None,
        on_cancelled: Callable[[list[str]], None] = lambda uids: None,
        on_lost_prompts: Callable[[list[Group]], None] = lambda groups: None,
        any_success: Callable[[], bool] = lambda: True,
    ) -> None:
        """`per_step`: groups that a version trains. `on_cancelled`: uids of groups that were dropped while they may
        have been generated. `max_failed`, `max_filtered`, `any_success`: see GivingUp."""
        self.buffer = GroupBuffer()
        self.kept = self.filtered = 0
        """Groups leased, and filtered out, since the start."""
        self.credit = per_step
        """Groups that may be out; what goes beyond is not generated."""
        self._version = 0  # at which the next batch will be trained
        self._client = client
        self._partition = partition
        self._selection = selection
        self._events = events
        self._per_step = per_step
        self._in_order = in_order
        self._stall_timeout = stall_timeout
        self._holder = holder
        self._on_left = on_left
        self._on_cancelled = on_cancelled
        self._on_lost_prompts = on_lost_prompts
        self._giving_up = GivingUp(max_failed, max_filtered, any_success)
        self._fit: dict[str, Group] = {}  # ready groups that are fit at `_version`
        self._known: dict[str, tuple[int, int]] = {}  # closed sessions of a group, and the version of its oldest token
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def start(self, version: int = 0) -> None:
        """Take the first snapshot, then follow the changes in the background. Servers have `version`."""
        self._version = self.buffer.in_service = version
        await self._fold(await self._client.watch(self._partition, -1))
        await self._look_at([group for group in self.buffer.waiting() if group.sessions])  # an earlier life's
        self._task = asyncio.create_task(self._follow(), name=f"watch {self._partition}")
        self._task.add_done_callback(lambda _: asyncio.ensure_future(self._wake()))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def sample(self, count: int, version: int, *, room: int = 0) -> LeasedBatch:
        """Lease `count` whole groups to train at weights `version`; unfit ones are dropped. `room`: groups that this
        version will train after them.

        Raises DeadlineExceeded when nothing changed for `stall_timeout` seconds, naming the oldest unfinished groups.
        """
        await self.trains(version)
        while True:
            groups = await self._usable(count, room)
            uids = [group.uid for group in groups]
            self._take(uids)
            with self._events.span("hand_off", step=version + 1):
                try:
                    leased = await self._client.lease(self._partition, "train", uids=uids, holder=self._holder)
                except NotFound as error:  # one of them left meanwhile (a lost unit): look at everything anew
                    log.info("could not lease %d groups: %s", len(uids), error)
                    await self._fold(await self._client.watch(self._partition, -1))
                    continue
            self.kept += count
            return LeasedBatch(leased.token, sorted(leased.groups, key=lambda g: g.order))

    async def trains(self, version: int) -> None:
        """The next batch will be trained at `version`: what is too old for it leaves now."""
        async with self._changed:
            if version != self._version:
                self._version = version
                self._fit.clear()
                await self._sort_out()

    async def trained(self, batches: Sequence[LeasedBatch], step: int, version: int) -> None:
        """Ack the groups of `step`; its weights are `version`, which is in service."""
        for batch in batches:
            self.buffer.will_be_trained(batch.uids, version)
            await self._client.ack(self._partition, batch.token, batch.uids, step=step)

    async def drop_rest(self, reason: str) -> None:
        """Drop whatever is ready or being generated and not leased; what has not begun stays."""
        async with self._changed:
            await self._drop([g.uid for g in self.buffer.ready()], reason)
            begun = [g.uid for g in self.buffer.waiting() if g.state == "generating" or g.sessions]
            await self._drop(begun, reason)
            if begun:
                self._on_cancelled(begun)

    async def wait_ready(self, count: int) -> None:
        """Until `count` groups are ready; takes none."""
        async with self._changed:
            while len(ready := self.buffer.ready()) < count:
                await self._change(f"{count} ready groups ({len(ready)} are)")

    # --- choosing -----------------------------------------------------------------------------------------------

    async def _usable(self, count: int, room: int) -> Sequence[Group]:
        lacking: Lack | None = None
        async with self._changed:
            with ExitStack() as span:
                while True:
                    chosen = self._choose(count, room)
                    if not isinstance(chosen, str):
                        self._giving_up.leased()
                        return chosen
                    if chosen != lacking:
                        span.close()
                        span.enter_context(self._events.span(chosen, step=self._version + 1))
                        lacking = chosen
                    ready = len(self.buffer.ready())
                    why = "" if chosen == "wait_data" else f", which wait for {self._selection.chooser}"
                    await self._change(f"{count} usable groups ({ready} are ready{why})")

    def _choose(self, count: int, room: int) -> Sequence[Group] | Lack:
        if len(self._fit) < count:  # which may hold more than are ready still
            return "wait_data"
        ready = [group for group in self.buffer.ready() if self._fit.get(group.uid) is group]
        if len(ready) < count:
            return "wait_data"
        if self._in_order:
            waiting = self.buffer.waiting()
            return ready[:count] if not waiting or waiting[0].order > ready[count - 1].order else "wait_order"
        chosen = self._selection.choose(ready, count, self._version)
        if chosen is None:
            return "wait_order"
        if not self._selection.staleness.waits:
            return chosen
        taken = {group.uid for group in chosen}
        rest = [group for group in ready if group.uid not in taken]
        growing = [self.buffer.begun[group.uid] for group in self.buffer.coming(self.credit)]
        held = self._selection.staleness.holds_back(rest, growing, self._version, Room(room, self._per_step))
        return "wait_order" if held else chosen

    # --- dropping -----------------------------------------------------------------------------------------------

    async def _sort_out(self) -> None:
        """Drop what can no longer be trained."""
        by_reason: dict[str, list[str]] = {}
        for group in self.buffer.ready():
            if self._fit.get(group.uid) is group:
                continue
            if reason := self._selection.unfit(group, self._version):
                by_reason.setdefault(reason, []).append(group.uid)
            else:
                self._fit[group.uid] = group
        for reason, uids in by_reason.items():
            await self._drop(uids, reason)
        await self._cancel_hopeless()
        filtered = len(by_reason.get(FILTERED, ()))
        self.filtered += filtered
        self._giving_up.filtered(filtered)

    async def _drop(self, uids: list[str], reason: str) -> None:
        if uids:
            self._take(uids)
            await self._client.drop(self._partition, uids, reason)

    def _take(self, uids: list[str]) -> None:
        self.buffer.forget(uids)
        for uid in uids:
            self._fit.pop(uid, None)

    async def _cancel_hopeless(self) -> None:
        """Of groups that are being generated: a closed session tells how old the group is at least."""
        hopeless = self._selection.staleness.hopeless
        if not hopeless(-1, self._version):
            return
        begun = self.buffer.begun
        old = [group for group in self.buffer.waiting() if group.sessions and hopeless(begun[group.uid], self._version)]
        await self._look_at(old)
        found = [g.uid for g in old if g.uid in self._known and hopeless(self._known[g.uid][1], self._version)]
        await self._drop(found, CANCELLED)
        if found:
            self._on_cancelled(found)

    async def _look_at(self, groups: list[Group]) -> None:
        """Learn of groups with closed sessions how old their oldest token is."""
        new = [group for group in groups if self._known.get(group.uid, (0, 0))[0] != len(group.sessions)]
        if not new:
            return
        uids = {row_key(group.uid, session, 0): group.uid for group in new for session in group.sessions}
        located = await self._client.lookup(self._partition, list(uids), [])
        oldest: dict[str, int] = {}
        for key, tag in zip(located.keys, located.tags, strict=True):
            uid, version = uids[key], int(tag["min_global_steps"])
            oldest[uid] = min(version, oldest.get(uid, version))
        for group in new:
            if group.uid in oldest:
                self._known[group.uid] = (len(group.sessions), oldest[group.uid])
                self.buffer.has_token_of(group.uid, oldest[group.uid])

    # --- news ---------------------------------------------------------------------------------------------------

    async def _change(self, what: str) -> None:
        """The next news from the queue, or the reason why there will be none."""
        seen = self.buffer.seq
        try:
            async with asyncio.timeout(self._stall_timeout):
                await self._changed.wait_for(lambda: self.buffer.seq != seen or self._failure() is not None)
        except TimeoutError:
            oldest = ", ".join(f"{g.uid} ({g.state}, attempt {g.attempt})" for g in self.buffer.waiting()[:3]) or "none"
            failed = f"the last that failed: {why}. " if (why := self._giving_up.last_failure) else ""
            raise DeadlineExceeded(
                f"the trainer waited {self._stall_timeout:g} s for {what} of partition {self._partition!r}; depth "
                f"{self.buffer.depth}; oldest unfinished: {oldest}. {failed}"
                f"{await look_at(self._client, 'Look at the agent workers and LLM servers')}, or raise "
                "trainer.stall_timeout"
            ) from None
        if failure := self._failure():
            raise failure

    def _failure(self) -> BaseException | None:
        if failure := self._giving_up.failure(self.buffer):
            return failure
        if self._task is None or not self._task.done():
            return None
        if self._task.cancelled():
            return RuntimeError("the watch of the queue was cancelled")
        return self._task.exception()

    async def _follow(self) -> None:
        while True:
            await self._fold(await self._client.watch(self._partition, self.buffer.seq, wait=60.0))

    async def _fold(self, changes: Changes) -> None:
        async with self._changed:
            left = self.buffer.apply(changes)
            if left:
                self._giving_up.left(left, self.buffer)
                self._on_left(left)
            if self.buffer.lost_prompts:
                self._on_lost_prompts(list(self.buffer.lost_prompts.values()))
            for known in (self._fit, self._known):
                for uid in [uid for uid in known if uid not in self.buffer.groups]:
                    del known[uid]
            try:
                await self._sort_out()
            finally:
                self._changed.notify_all()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
