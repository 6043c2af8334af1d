"""The modes: each is a few hooks on the one loop."""

from __future__ import annotations

from streamrl.trainer.loop import Trainer
from transfer_queue.net.messages import Group


class SyncTrainer(Trainer):
    """On-policy, generation and training take turns: every token of a step was sampled by the weights it trains.

    The feeder gets one batch of prompts per step, one more for each that failed, and training starts only when all
    have ended. Age is always 0.
    """

    in_order = True

    @property
    def max_outstanding(self) -> int:
        return self.groups_per_step

    @property
    def max_age(self) -> int | None:
        return 0

    @property
    def groups_per_update(self) -> int:
        return self.groups_per_step

    async def before_step(self) -> None:
        live = len(self.buffer.buffer.groups)  # left by an interrupted step
        self.feeder.allow(max(0, self.groups_per_step - live))
        await self.buffer.wait_ready(self.groups_per_step)

    def on_left(self, groups: list[Group]) -> None:
        self.feeder.allow(len(groups))


class SeparateAsyncTrainer(Trainer):
    """Generation never stops; weights are swapped in flight.

    `num_warmup_batches` further batches are outstanding beside the one being trained; a group whose oldest token is
    older than `max_off_policy_threshold` - 1 versions is dropped and its credit issues another prompt.
    """

    async def before_step(self) -> None:
        if self.config.trainer.v1.separate_async.fixed_lag:
            await self.buffer.wait_ready(self.max_outstanding)

    @property
    def max_outstanding(self) -> int:
        warmup = self.config.trainer.v1.separate_async.num_warmup_batches
        return round((1 + warmup) * self.groups_per_step)

    @property
    def max_age(self) -> int | None:
        sampler = self.config.trainer.v1.sampler
        if sampler.max_off_policy_strategy != "drop" or sampler.max_off_policy_threshold is None:
            return None
        return sampler.max_off_policy_threshold - 1


MODES: dict[str, type[Trainer]] = {"sync": SyncTrainer, "separate_async": SeparateAsyncTrainer}
