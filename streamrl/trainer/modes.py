"""The modes: each is a few hooks on the one loop."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from streamrl.trainer.filter_rate import FilterRate
from streamrl.trainer.loop import Trainer
from streamrl.trainer.parts import Parts
from streamrl.trainer.staleness import staleness
from transfer_queue.net.messages import Group


class SyncTrainer(Trainer):
    """On-policy, generation and training take turns: every token of a step was sampled by the weights it trains.

    The feeder gets one batch of prompts per step, one more for each that failed, and training starts only when all
    have ended. Age is always 0. Where groups are filtered out (DAPO), as many more are issued as the running rate says,
    and those with the lowest dispatch order are trained, not those that finished first; what is over is dropped, since
    it would be too old for the next step.
    """

    in_order = True

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._rate = FilterRate()
        self._out: int | None = None
        """Groups that were asked for, and have neither left nor been trained; None before the first step."""
        self._gathers = False

    @property
    def max_outstanding(self) -> int:
        return self.groups_per_step

    @property
    def groups_per_update(self) -> int:
        return self.groups_per_step

    async def before_step(self) -> None:
        if self._out is None:
            self._out = len(self.buffer.buffer.groups)  # an earlier life's
        self._gathers = True
        self._rate.look(self.buffer.kept, self.buffer.filtered)
        await self.give_credit(math.ceil(self.groups_per_step * self._rate.prompts_per_group))
        self._top_up()
        await self.buffer.wait_ready(self.groups_per_step)

    async def on_sampled(self) -> None:
        self._gathers = False
        if self.config.algorithm.filter_groups.enable:
            await self.buffer.drop_rest("surplus")

    async def on_published(self) -> None:
        self._out = (self._out or 0) - self.groups_per_step

    def on_left(self, groups: list[Group]) -> None:
        if self._out is not None:
            self._out -= len(groups)
        if self._gathers:
            self._top_up()

    def _top_up(self) -> None:
        """Issue what the expected number of groups lacks of a batch."""
        out, ready = self._out or 0, len(self.buffer.buffer.ready())
        prompts = self._rate.prompts_per_group
        lacking = self.groups_per_step - ready - (out - ready) / prompts
        if lacking > 1e-6:
            more = math.ceil(lacking * prompts - 1e-6)
            self._out = out + more
            self.feeder.allow(more)


class AsyncTrainer(Trainer):
    """Samples may be older than the weights that are trained, by a bound (`trainer.v1.sampler`).

    `num_warmup_batches` further batches are outstanding beside the one being trained, but no more than can be trained
    before they are too old; where groups are filtered out (DAPO), more by the running rate, within the same limit.
    """

    def __init__(self, parts: Parts) -> None:
        self._rate = FilterRate()
        self.staleness = staleness(parts.config.trainer.v1.sampler)
        super().__init__(parts)

    @property
    def warmup_batches(self) -> float:
        return self.config.trainer.v1.separate_async.num_warmup_batches

    @property
    def max_outstanding(self) -> int:
        wanted = (1 + self.warmup_batches) * self.groups_per_step * self._rate.prompts_per_group
        return self.staleness.credit(round(wanted), self.groups_per_step)

    async def before_step(self) -> None:
        self._rate.look(self.buffer.kept, self.buffer.filtered)
        await self.give_credit(self.max_outstanding)


class SeparateAsyncTrainer(AsyncTrainer):
    """Generation never stops; weights are swapped in flight."""

    validates_beside = True

    @property
    def may_lag(self) -> int | None:
        """What the bound on age leaves beside the batches that are out: a group is trained about so many versions after
        it was begun."""
        if self.config.trainer.v1.separate_async.fixed_lag:
            return 0
        bound = self.staleness.max_age
        return None if bound is None else max(0, bound - math.ceil(self.warmup_batches))

    async def before_step(self) -> None:
        await super().before_step()
        if self.config.trainer.v1.separate_async.fixed_lag:
            await self.buffer.wait_ready(self.max_outstanding)


class ColocateAsyncTrainer(AsyncTrainer):
    """Generation and training take turns on the same devices: servers generate until a step's groups are there, then
    sleep; the step trains, the servers take its weights and wake up. What was being generated goes on with the new
    weights, so the tail of a step carries over to the next instead of holding it up."""

    @property
    def warmup_batches(self) -> float:
        return self.config.trainer.v1.colocate_async.num_warmup_batches

    @property
    def groups_per_update(self) -> int:
        return self.groups_per_step

    async def on_sampled(self) -> None:
        with self.parts.events.span("hand_off", step=self.step + 1):
            await self.parts.servers.sleep()

    @asynccontextmanager
    async def generation_paused(self) -> AsyncIterator[None]:
        await self.parts.servers.sleep()
        try:
            yield
        finally:
            await self.parts.servers.wake_up()

    async def on_published(self) -> None:
        with self.parts.events.span("publish", version=self.version_of(self.step + 1)):
            await self.parts.servers.wake_up()


MODES: dict[str, type[Trainer]] = {
    "sync": SyncTrainer,
    "colocate_async": ColocateAsyncTrainer,
    "separate_async": SeparateAsyncTrainer,
}
