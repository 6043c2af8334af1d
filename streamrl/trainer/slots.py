"""The slots of deterministic mode: which prompt is trained where, whoever comes first. See trainer/deterministic.py.

A batch is P slots. The first prompt of a slot is the one with its dispatch order; where that ended untrained (filtered
out, failed) another takes its place, from far behind in the dataset: a function of the slot and of how many it had.
Everything here is a decision about numbers but `SlotFeeder`, which admits what is wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from streamrl.trainer.feeder import Feeder, Prompts, PromptSource, prompts_at
from streamrl.trainer.staleness import newest_version, oldest_version
from transfer_queue.client import QueueClient
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.net.messages import Group

REFILLS = 64
"""Further prompts that a slot may get, where those before were filtered out or failed."""
REFILL_EPOCH = 1_000_000
"""The dataset's epoch from which they come: far behind any that is trained."""

ATTEMPT, VERSION = "refill", "weight_version"
"""In a group's tag: the how manieth prompt of its slot it is, and the version that samples it."""


class OutOfOrder(RuntimeError):
    """What came back is not what the rule says: a bug, or a server that does not heed the version it is asked for."""


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The `attempt`th prompt (from 0) of the slot with dispatch order `order`."""

    order: int
    attempt: int = 0

    @property
    def next(self) -> Slot:
        return Slot(self.order, self.attempt + 1)

    def prompt(self, dataset: int) -> int:
        """Which prompt it is, as a dispatch order over the epochs of a dataset of that many rows."""
        if self.attempt == 0:
            return self.order
        return REFILL_EPOCH * dataset + self.order * REFILLS + self.attempt - 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """`per_step`: P. `lag`: steps between the weights that sample a batch and those that are trained on it."""

    per_step: int
    lag: int

    def step_of(self, order: int) -> int:
        return order // self.per_step + 1

    def orders(self, step: int) -> range:
        """The slots that `step` trains."""
        return range((step - 1) * self.per_step, step * self.per_step)

    def sampled_after(self, step: int) -> int:
        """The step whose weights sample what `step` trains."""
        return max(0, step - 1 - self.lag)

    def issued_after(self, step: int) -> range:
        """The steps whose prompts may be out once `step` steps are trained."""
        return range(step + 1, step + 2 + self.lag)


class Slots:
    """Which prompt of each slot is out. Invariant: one at a time, and the next only after it ended untrained; so the
    one that is trained does not depend on when any of them ended."""

    def __init__(self) -> None:
        self._out: dict[int, int] = {}

    def missing(self, orders: Iterable[int]) -> list[Slot]:
        """Of these slots, those of which no prompt is out: their first ones."""
        return [Slot(order) for order in orders if order not in self._out]

    def stands(self, slot: Slot) -> None:
        """It is out."""
        self._out[slot.order] = max(slot.attempt, self._out.get(slot.order, 0))

    def ended(self, slot: Slot) -> Slot | None:
        """It ended untrained. What comes in its place, None if something has. Raises RuntimeError when it had all."""
        if self._out.get(slot.order) != slot.attempt:
            return None
        if slot.attempt == REFILLS:
            raise RuntimeError(
                f"slot {slot.order} had {REFILLS + 1} prompts, each of which was filtered out or failed: the data is "
                "too easy or too hard for this policy, or the agent or the reward function is broken"
            )
        self.stands(slot.next)
        return slot.next

    def trained(self, orders: Iterable[int]) -> None:
        for order in orders:
            self._out.pop(order, None)


def slot_of(group: Group) -> Slot:
    return Slot(group.order, int(group.tag[ATTEMPT]))


def check_version(group: Group) -> None:
    """Raises OutOfOrder unless every token of the ready group was sampled by the version that was asked for."""
    asked, found = group.tag[VERSION], {oldest_version(group), newest_version(group)}
    if found != {asked}:
        raise OutOfOrder(f"group {group.uid} was to be sampled by weight version {asked}, not {sorted(found)}")


class InTurn:
    """Which ready groups are trained next (streamrl.trainer.selection.Sampler): the next slots, once all are filled."""

    def __init__(self, first: Callable[[], int]) -> None:
        """`first`: the order of the next slot to be trained."""
        self._first = first

    def choose(self, ready: Sequence[Group], count: int, version: int) -> Sequence[Group] | None:
        first = self._first()
        chosen = [group for group in ready if first <= group.order < first + count]
        if len(chosen) < count:
            return None
        for group in chosen:
            check_version(group)
        return chosen


class SlotFeeder(Feeder):
    """Consumes: slots that are to be filled. Produces: admitted groups. Woken by: a step's end, a group's end.

    `allow` only lets it begin; what may be out is the schedule's to say.
    """

    def __init__(
        self, client: QueueClient, source: PromptSource, *, partition: str, n: int, chunk: int, baseline: bool,
        version_of: Callable[[int], int],
    ) -> None:  # fmt: skip
        """`version_of(order)`: the version that samples a slot."""
        super().__init__(client, source, partition=partition, n=n, chunk=chunk, baseline=baseline)
        self.slots = Slots()
        self._version_of = version_of
        self._wanted: asyncio.Queue[list[Slot]] = asyncio.Queue()
        self._may_begin = asyncio.Event()
        self._may_have_ended = False

    def resumed(self, live: Iterable[Group]) -> None:
        """These are out, from an earlier life; others may have ended in it."""
        self._may_have_ended = True
        for group in live:
            self.slots.stands(slot_of(group))

    def allow(self, prompts: int | None) -> None:
        if prompts is None:
            self._may_begin.set()

    def fill(self, slots: list[Slot]) -> None:
        """Issue these prompts."""
        for slot in slots:
            self.slots.stands(slot)
        if slots:
            self._wanted.put_nowait(slots)

    def left(self, groups: Iterable[Group]) -> None:
        """These ended untrained: others take their slots."""
        self.fill([slot for group in groups if (slot := self.slots.ended(slot_of(group))) is not None])

    async def run(self) -> None:
        await self._may_begin.wait()
        while True:
            await self._issue(await self._wanted.get())

    async def admit_again(self, groups: list[Group]) -> None:
        await self._admit_slots([slot_of(group) for group in groups])

    async def _issue(self, slots: list[Slot]) -> None:
        await self._admit_slots(slots)
        if not self._may_have_ended:
            return
        # The queue takes no prompt again with which it has finished; its slot goes on where it was.
        live = {group.uid for group in (await self._client.watch(self._partition, -1)).groups}
        uids = self._prompts(slots).specs
        ended = [slot for slot, spec in zip(slots, uids, strict=True) if spec.uid not in live]
        self.fill([slot for each in ended if (slot := self.slots.ended(each)) is not None])

    async def _admit_slots(self, slots: list[Slot]) -> None:
        for start in range(0, len(slots), self._chunk):
            chunk = slots[start : start + self._chunk]
            if not await self._admit_prompts(self._prompts(chunk)):
                raise DeadlineExceeded(
                    f"no room for the prompts of slots {[slot.order for slot in chunk]}: the queue's memory is full"
                )

    def _prompts(self, slots: list[Slot]) -> Prompts:
        dataset = len(self._source)
        prompts = prompts_at(self._source, [slot.prompt(dataset) for slot in slots], self._n, baseline=self._baseline)
        specs = [
            replace(
                spec, order=slot.order, tag={**spec.tag, ATTEMPT: slot.attempt, VERSION: self._version_of(slot.order)}
            )
            for slot, spec in zip(slots, prompts.specs, strict=True)
        ]
        return Prompts(specs, prompts.columns)
