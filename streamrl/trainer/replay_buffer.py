"""The trainer's view of what is ready: fed by `watch`, never by polling.

    queue ──watch──► GroupBuffer (state by uid) ──take oldest──► lease ──► Batch
                          │ too old, or all its scores are equal
                          └────────► drop: credit returns at once, the feeder issues one more prompt

`GroupBuffer` is the sans-IO part; `ReplayBuffer` is the shell around it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from streamrl.monitor.events import EventLog
from streamrl.trainer.selection import FILTERED, Selection
from transfer_queue.client import QueueClient
from transfer_queue.errors import DeadlineExceeded, NotFound
from transfer_queue.net.messages import Changes, Group, Token

log = logging.getLogger(__name__)

LIVE = ("pending", "generating", "ready", "training")


FIRST_GROUPS = 8
"""When so many groups failed with the same type of error, and no session ever succeeded, the code is broken."""


def kind_of(group: Group) -> str:
    """The type of the error with which a group failed."""
    return group.reason.removeprefix("failed: ").partition(":")[0]


@dataclass(slots=True)
class GroupBuffer:
    """Live groups of one partition as the change log tells them.

    Invariants: a group is here iff its last told state is live; `take` never returns a group twice before the
    queue told that it is ready again; groups leave oldest dispatch order first.
    """

    groups: dict[str, Group] = field(default_factory=dict)
    depth: dict[str, int] = field(default_factory=dict)
    seq: int = -1
    failed_in_a_row: int = 0
    kinds: set[str] = field(default_factory=set)
    """Types of the errors of the first groups, as long as all of them failed."""
    succeeded: bool = False
    """Whether any group ever became ready."""
    _taken: set[str] = field(default_factory=set)
    lost_prompts: dict[str, Group] = field(default_factory=dict)
    place: dict[str, int] = field(default_factory=dict)
    """Of groups whose order was decided elsewhere (a replay)."""

    def apply(self, changes: Changes) -> list[Group]:
        """Fold one answer of `watch` into the view; the groups that left untrained (dropped, dead)."""
        if changes.snapshot:
            self.groups.clear()
            self._taken.clear()
        left: list[Group] = []
        for group in changes.groups:
            self._taken.discard(group.uid)
            self.lost_prompts.pop(group.uid, None)
            if group.state in LIVE:
                self.groups[group.uid] = group
                if group.state == "pending" and group.reason == "prompt lost":
                    self.lost_prompts[group.uid] = group
                elif group.state == "ready":
                    self.failed_in_a_row, self.succeeded = 0, True
                continue
            self.groups.pop(group.uid, None)
            if group.state in ("dropped", "dead"):
                left.append(group)
                failed = group.state == "dead" or group.reason.startswith("failed")
                self.failed_in_a_row += failed
                if failed and not self.succeeded:
                    self.kinds.add(kind_of(group))
        self.depth = dict(changes.depth)
        self.seq = changes.seq
        return left

    @property
    def all_failed_alike(self) -> bool:
        """Whether the first groups, FIRST_GROUPS or more, failed with the same type of error."""
        return not self.succeeded and self.failed_in_a_row >= FIRST_GROUPS and len(self.kinds) == 1

    def ready(self) -> list[Group]:
        """Ready groups that are not taken, oldest dispatch order first."""
        found = [g for g in self.groups.values() if g.state == "ready" and g.uid not in self._taken]
        return sorted(found, key=lambda g: (self.place.get(g.uid, 0), g.order))

    def waiting(self) -> list[Group]:
        """Groups still being generated, oldest dispatch order first."""
        return sorted((g for g in self.groups.values() if g.state in ("pending", "generating")), key=lambda g: g.order)

    def forget(self, uids: list[str]) -> None:
        """These were leased or dropped by us; wait for the queue to speak of them again."""
        self._taken.update(uids)


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
        in_order: bool = False,
        stall_timeout: float = 300.0,
        holder: str = "trainer",
        max_failed: int = 64,
        max_filtered: int = 0,
        on_left: Callable[[list[Group]], None] = lambda groups: None,
        on_lost_prompts: Callable[[list[Group]], None] = lambda groups: None,
        any_success: Callable[[], bool] = lambda: True,
    ) -> None:
        """`any_success`: whether any session ever succeeded, asked once, when the first groups all failed."""
        self.buffer = GroupBuffer()
        self._client = client
        self._partition = partition
        self._selection = selection
        self._events = events
        self._in_order = in_order
        self._stall_timeout = stall_timeout
        self._holder = holder
        self._max_failed = max_failed
        self._max_filtered = max_filtered
        self._filtered_in_a_row = 0
        self._on_left = on_left
        self._on_lost_prompts = on_lost_prompts
        self._last_failure = ""
        self._any_success = any_success
        self._hopeless: bool | None = None
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take the first snapshot, then follow the changes in the background."""
        await self._fold(await self._client.watch(self._partition, -1))
        self._task = asyncio.create_task(self._follow(), name=f"watch {self._partition}")
        self._task.add_done_callback(lambda _: asyncio.ensure_future(self._wake()))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def sample(self, count: int, version: int) -> LeasedBatch:
        """Lease `count` whole groups to train at weights `version`, oldest first; unfit ones are dropped.

        Raises DeadlineExceeded when nothing changed for `stall_timeout` seconds, naming the oldest unfinished groups.
        """
        while True:
            with self._events.span("wait_data", step=version + 1):
                groups = await self._usable(count, version)
            uids = [group.uid for group in groups]
            self.buffer.forget(uids)
            with self._events.span("hand_off", step=version + 1):
                try:
                    leased = await self._client.lease(self._partition, "train", uids=uids, holder=self._holder)
                except NotFound as error:  # one of them left meanwhile (a lost unit): look at everything anew
                    log.info("could not lease %d groups: %s", len(uids), error)
                    await self._fold(await self._client.watch(self._partition, -1))
                    continue
            return LeasedBatch(leased.token, sorted(leased.groups, key=lambda g: g.order))

    async def wait_ready(self, count: int) -> None:
        """Until `count` groups are ready; takes none."""
        async with self._changed:
            while len(ready := self.buffer.ready()) < count:
                await self._change(f"{count} ready groups ({len(ready)} are)")

    async def _usable(self, count: int, version: int) -> list[Group]:
        async with self._changed:
            while True:
                ready = self.buffer.ready()
                if await self._drop_unfit(ready, version):
                    continue
                if len(ready) >= count and (not self._in_order or self._first_are_ready(ready[:count])):
                    self._filtered_in_a_row = 0
                    return ready[:count]
                await self._change(f"{count} usable groups ({len(ready)} are ready)")

    async def _drop_unfit(self, ready: list[Group], version: int) -> bool:
        by_reason: dict[str, list[str]] = {}
        for group in ready:
            if reason := self._selection.unfit(group, version):
                by_reason.setdefault(reason, []).append(group.uid)
        for reason, uids in by_reason.items():
            self.buffer.forget(uids)
            await self._client.drop(self._partition, uids, reason)
        self._filtered_in_a_row += len(by_reason.get(FILTERED, ()))
        if 0 < self._max_filtered <= self._filtered_in_a_row:
            raise RuntimeError(
                f"{self._filtered_in_a_row} prompt groups since the last step were filtered out, as all samples of "
                "each scored the same: the data is too easy or too hard for this policy, or the reward does not "
                "discriminate (trainer.log_val_generations=4 shows answers). Raise "
                "algorithm.filter_groups.max_num_gen_batches (0: no limit) or change the data"
            )
        return bool(by_reason)

    def _first_are_ready(self, chosen: list[Group]) -> bool:
        waiting = self.buffer.waiting()
        return not waiting or waiting[0].order > chosen[-1].order

    async def _change(self, what: str) -> None:
        """The next news from the queue, or the reason why there will be none."""
        seen = self.buffer.seq
        try:
            async with asyncio.timeout(self._stall_timeout):
                await self._changed.wait_for(lambda: self.buffer.seq != seen or self._failure() is not None)
        except TimeoutError:
            oldest = ", ".join(f"{g.uid} ({g.state}, attempt {g.attempt})" for g in self.buffer.waiting()[:3]) or "none"
            raise DeadlineExceeded(
                f"the trainer waited {self._stall_timeout:g} s for {what} of partition {self._partition!r}; depth "
                f"{self.buffer.depth}; oldest unfinished: {oldest}. Look at the agent workers and LLM servers, "
                "or raise trainer.stall_timeout"
            ) from None
        if failure := self._failure():
            raise failure

    def _failure(self) -> BaseException | None:
        if self._hopeless or self.buffer.failed_in_a_row >= self._max_failed:
            none = ", and no session ever succeeded" if self._hopeless else ""
            return RuntimeError(
                f"{self.buffer.failed_in_a_row} prompt groups in a row failed{none}, the last with: "
                f"{self._last_failure}. The agent loop, its tools or the reward function is broken for every prompt"
            )
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
                failures = [group.reason for group in left if group.reason.startswith("failed")]
                self._last_failure = failures[-1].removeprefix("failed: ") if failures else self._last_failure
                if self._hopeless is None and self.buffer.all_failed_alike:
                    self._hopeless = not self._any_success()
                self._on_left(left)
            if self.buffer.lost_prompts:
                self._on_lost_prompts(list(self.buffer.lost_prompts.values()))
            self._changed.notify_all()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
