"""The control flow of a run: one ordinary loop.

    feeder ──admit──► queue ──watch──► replay buffer ──lease──► update ──► publish ──► ack ──► (checkpoint)
                        ▲                                                    │
                  agent workers ◄──────────── LLM servers ◄──────────────────┘  version v+1

A step trains `data.train_batch_size` prompt groups in mini-batches of `ppo_mini_batch_size` groups, each as soon as
its groups are there, then publishes one new weight version. Version v is the weights after v steps of the actor (a
step that only warms up the critic makes none); the age of a token is the version that is trained minus the one that
sampled it. The modes (modes.py) only override the hooks, and `staleness` decides what is too old.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from statistics import mean
from typing import TypeVar

from agent_loop.rows import TEACHER_FIELD
from streamrl.data import training_steps
from streamrl.monitor.summary import Status
from streamrl.trainer.batch_log import BatchLog
from streamrl.trainer.checkpoint import TrainerState
from streamrl.trainer.damaged import drop_damaged, is_damage
from streamrl.trainer.feeder import Feeder
from streamrl.trainer.parts import Parts
from streamrl.trainer.queue_cut import QueueCut
from streamrl.trainer.queue_lineage import check_lineage, claim
from streamrl.trainer.replay_buffer import LeasedBatch, ReplayBuffer
from streamrl.trainer.report import Reporter
from streamrl.trainer.samples import Samples
from streamrl.trainer.saving import Saver
from streamrl.trainer.selection import Selection, custom_sampler
from streamrl.trainer.staleness import Drop, Measured, oldest_version
from streamrl.trainer.update import Update, together
from streamrl.trainer.validation_lane import Validations
from streamrl.workers.contract import WRITES
from transfer_queue.net.messages import Group, TaskSpec

log = logging.getLogger(__name__)
T = TypeVar("T")

PARTITION = "train"
TASKS = [
    TaskSpec("generate", "prompt", "clock", ttl=15.0),
    TaskSpec("train", "rows", "incarnation", fields=["input_ids", "response_mask", "rollout_log_probs"]),
]
SCORED = TaskSpec("train", "rows", "incarnation", fields=[*TASKS[1].fields, TEACHER_FIELD])
"""In place of the second where a teacher's servers score the rows: without their column a row is not ready."""
FAILED_BATCHES = 4
"""Stop when as many groups as this many batches failed in a row: the agent or the reward is broken, not unlucky."""


class Stopped(Exception):
    """Somebody asked the run to stop."""


class Trainer(ABC):
    """The single controller of a run. Subclasses are the modes.

    Invariants: every group admitted ends trained, dropped or dead; a group is in the batch log of exactly one step
    that counts; `version` is published before any group of the step is acked.
    """

    repeats = False
    """Whether a resume does again what was done after the checkpoint, so that whole groups stay (deterministic)."""
    validates_beside = False
    """Whether a validation that is due during training goes on beside it, or stops it."""
    in_order = False
    """Whether batches follow the dispatch order strictly (sync) or take what is ready, oldest first."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        self.parts = parts
        self.config = config
        self.step = 0
        self.groups_per_step = config.data.train_batch_size
        self.mini_batch = min(config.actor_rollout_ref.actor.ppo_mini_batch_size, self.groups_per_step)
        self.report = Reporter(parts, PARTITION)
        self.update = Update(config, parts.actor, parts.critic, parts.events, PARTITION)
        self.samples = Samples(config, parts.actor)
        self.stop = asyncio.Event()
        self._batch_log = BatchLog(parts.run.batches)
        cut = QueueCut(
            parts.queue, PARTITION, TASKS[0].name, include=config.trainer.ckpt_include_rows,
            computed=self._computed_columns(),
        )  # fmt: skip
        self.saver = Saver(parts, PARTITION, self._batch_log, self.report, self.update.kl, cut)
        self._to_admit_again: asyncio.Queue[list[Group]] = asyncio.Queue()
        self._to_cancel: asyncio.Queue[list[str]] = asyncio.Queue()
        self._credit = 0
        self._in_service = 0
        """Version that the servers have; behind `version` only while a validation holds it."""
        self.buffer = ReplayBuffer(
            parts.queue, PARTITION, selection=self._selection(), events=parts.events, per_step=self.groups_per_step,
            in_order=self.in_order,
            stall_timeout=config.trainer.stall_timeout, max_failed=FAILED_BATCHES * self.groups_per_step,
            max_filtered=config.algorithm.filter_groups.max_num_gen_batches * self.groups_per_step,
            on_left=self._groups_left, on_cancelled=self._to_cancel.put_nowait,
            on_lost_prompts=self._to_admit_again.put_nowait,
            any_success=self.report.any_session_succeeded,
        )  # fmt: skip
        self.feeder = Feeder(
            parts.queue, parts.train_data, partition=PARTITION, n=config.actor_rollout_ref.rollout.n,
            chunk=max(1, self.mini_batch // 4), baseline="baseline" in self.update.estimator.needs, events=parts.events,
        )  # fmt: skip
        self.validations = Validations(
            parts, self.samples, self.report, self._or_stopped, beside=self.validates_beside,
            reward_model=self.update.reward_model, paused=self.generation_paused,
        )  # fmt: skip

    def _selection(self) -> Selection:
        algorithm, sampler = self.config.algorithm, self.config.trainer.v1.sampler
        return Selection(
            self.staleness, algorithm.filter_groups.enable, algorithm.gdpo_reward_keys,
            custom_sampler(sampler.custom_sampler, sampler.sampler_kwargs),
        )  # fmt: skip

    def version_of(self, step: int) -> int:
        """Of the weights after `step`."""
        return max(0, step - self.config.trainer.critic_warmup)

    @property
    def version(self) -> int:
        """Of the weights as they are: those that the next step trains."""
        return self.version_of(self.step)

    # --- hooks of the modes -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def max_outstanding(self) -> int:
        """Credit: groups issued and not yet trained or dropped."""

    staleness: Measured = Drop(0)
    """What is too old, and what is done about it."""

    @property
    def groups_per_update(self) -> int:
        """Groups leased and trained together: a mini-batch, as soon as it is there, or the whole step."""
        return self.mini_batch

    def total_steps(self) -> int:
        return training_steps(self.config, len(self.parts.train_data))

    @property
    def may_lag(self) -> int | None:
        """Versions by which the servers may stay behind while a validation holds theirs; None: any number."""
        return 0

    async def before_step(self) -> None:  # noqa: B027  # a hook: nothing by default
        """Before the first sample of a step; what it takes counts as waiting for data."""

    async def on_sampled(self) -> None:  # noqa: B027
        """All groups of a step are leased; the last of them are about to be trained."""

    async def on_published(self) -> None:  # noqa: B027
        """The servers have the weights that the next step trains."""

    def generation_paused(self) -> AbstractAsyncContextManager[None]:
        """Around what the ranks compute while servers are awake, if these take their devices."""
        return nullcontext()

    def on_left(self, groups: list[Group]) -> None:  # noqa: B027
        """Groups left untrained."""

    # --- the run ----------------------------------------------------------------------------------------------

    async def fit(self) -> Status:
        """Run to the end; the status: "finished" or "interrupted" (after `stop` was set)."""
        status: Status = "failed"
        try:
            try:
                await self._or_stopped(self._open())
            except Stopped:
                status = "interrupted"
                return status
            async with asyncio.TaskGroup() as background:
                tasks = [
                    background.create_task(self.parts.agents.run(), name="agents"),
                    background.create_task(self.feeder.run(), name="feeder"),
                    background.create_task(self._admit_lost_prompts(), name="lost prompts"),
                    background.create_task(self._cancel_in_flight(), name="cancelled"),
                    background.create_task(self.parts.actor.watch(), name="ranks"),
                    background.create_task(self.saver.watch(), name="checkpoints"),
                ]
                status = await self._run_until_stopped()
                for task in tasks:
                    task.cancel()
        finally:
            await self.saver.close()
            await self.validations.close()
            await self.buffer.close()
            self._batch_log.close()
            self.report.close(status)
        return status

    async def _run_until_stopped(self) -> Status:
        try:
            await self._run_steps()
        except Stopped:
            self.report.stopping()
            if self.step > self.saver.saved_step:
                await self._checkpoint()
            await self.saver.finish()
            return "interrupted"
        return "finished"

    async def _run_steps(self) -> None:
        total = self.total_steps()
        trainer = self.config.trainer
        if trainer.val_only or (trainer.val_before_train and "before" not in self.validations.means):
            await self.validations.in_place("before", self.step)
        if trainer.val_only:
            return
        if not self.in_order:
            self.feeder.allow(None)
        self.report.training_begins(total)
        await self.report.look(self.version)
        while self.step < total:
            await self._catch_up()
            if self.step and self._due(trainer.test_freq):
                await self.validations.due(self.step)
            await self.train_step()
            self.validations.check()
            if self._due(trainer.save_freq):
                await self._checkpoint()
        if self.saver.saved_step < self.step:  # whatever save_freq is, the trained weights are kept
            await self._checkpoint()
        await self._or_stopped(self.validations.idle())
        await self._catch_up()
        await self.validations.in_place("after", self.step)
        await self.saver.finish()

    async def train_step(self) -> None:
        """One step: its mini-batches, one new version, one line of metrics."""
        step = self.step + 1
        with self.parts.events.span("step", step=step) as span:
            self.report.step_begins()
            with self.parts.events.span("wait_data", step=step):
                await self._or_stopped(self.before_step())
            batches: list[LeasedBatch] = []
            version = self.version_of(step)
            for room in range(self.groups_per_step - self.groups_per_update, -1, -self.groups_per_update):
                sample = self.buffer.sample(self.groups_per_update, self.version, room=room)
                # Once the weights have moved, the step is finished: a checkpoint of half a step trains groups twice.
                with self.parts.events.span("select", step=step):
                    batch = await (sample if batches else self._or_stopped(sample))
                    if not room:
                        await self.saver.copied()
                        await self.on_sampled()
                        await self.buffer.trains(version)
                batch, metrics = await self._update(batch, step, first=not batches)
                self.report.updated(metrics)
                batches.append(batch)
            groups = [group for batch in batches for group in batch.groups]
            if version != self.version:
                await self._publish_unless_held(version)
            await self.on_published()
            with self.parts.events.span("close_step", step=step):
                await self.samples.trained(step, PARTITION, groups)
                self._batch_log.trained(step, [g.uid for g in groups], [g.order for g in groups])
                await self.buffer.trained(batches, step, self._in_service)
                if self.config.trainer.save_freq <= 0:  # without checkpoints an ack is final at once
                    self._batch_log.committed(step, saved=False)
                    await self.parts.queue.commit_step(PARTITION, step)
                rows = self.report.trained(groups, self.version)
                self.step = step
                await self.report.look(version)
            span.add(groups=len(groups), samples=sum(len(g.rows) for g in groups), dropped=self.report.dropped_in_step)
        with self.parts.events.span("close_step", step=step):
            self.report.step_ends(step, rows)

    async def _update(self, batch: LeasedBatch, step: int, *, first: bool) -> tuple[LeasedBatch, dict[str, float]]:
        """The batch as it was trained, with the scores that counted, and the metrics of the update."""
        staleness = mean(self.version - oldest_version(group) for group in batch.groups)
        alone = self.groups_per_update == self.groups_per_step
        try:
            batch, scoring = await self.update.scored(batch, step=step)
            metrics = await self.update.run(
                batch,
                step=step,
                version=self.version,
                max_age=self.staleness.max_age,
                max_masked_ratio=self.staleness.max_masked_ratio,
                staleness=staleness,
                pi_old="current" if alone else "keep" if first else "kept",
            )
            return batch, together(scoring, metrics)
        except Exception as error:
            if is_damage(error):
                raise await drop_damaged(self.parts.queue, PARTITION, batch) from error
            raise

    async def _publish(self, version: int) -> None:
        with self.parts.events.span("publish", version=version) as span:
            info = await self.parts.actor.publish_weights(version)
            span.add(bytes=info.bytes, digest=info.digest)
            report = await self.parts.servers.update_weights(info)
            if report is None:  # a replay has no servers
                self._in_service = version
                return
            span.add(**{f"{stage}_s": seconds for stage, seconds in report.stages.items()})
            span.add(generation_stalled=report.stages["pause"], checksums=report.checksums)
            if report.missing:
                span.add(missing=report.missing)
        if report.in_service:
            self._in_service = version
            return
        log.warning(
            "no LLM server took version %d; they serve version %d: %s", version, self._in_service, report.missing
        )

    async def _publish_unless_held(self, version: int) -> None:
        """A validation may hold the servers' weights: then the ranks keep `version` to themselves. Once what is sampled
        with the held ones could not be trained in time any more, training waits for the validation."""
        if self.validations.holds and (self.may_lag is None or version - self._in_service <= self.may_lag):
            return
        if self.validations.holds:
            with self.parts.events.span("hold", step=self.step + 1), suppress(Stopped):  # the step is finished first
                await self._or_stopped(self.validations.idle())
        if not self.validations.holds:
            await self._publish(version)

    async def _catch_up(self) -> None:
        """The servers get what a validation has kept from them, once it has ended."""
        if self._in_service != self.version and not self.validations.holds:
            await self._publish(self.version)

    # --- opening and resuming -----------------------------------------------------------------------------------

    async def _open(self) -> None:
        queue = self.parts.queue
        tasks = [TASKS[0], SCORED] if self.config.distillation.on_servers else TASKS
        state = await self.saver.restore() if self.parts.run.resumed else TrainerState(0, 0)
        self._credit = self.buffer.credit = self.max_outstanding
        await queue.open_partition(PARTITION, tasks=tasks, max_groups=self._credit)
        await check_lineage(queue, PARTITION, self.parts.run.batches, directory=self.parts.run.queue)
        self.step = state.step
        restored = await queue.open_trainer(
            PARTITION, self.step, repeats=self.repeats, version=self.version, columns=self._computed_columns()
        )
        self.feeder.next_order = max(restored.next_order, state.next_order)
        self.feeder.allow(0)  # no prompts for training before it begins
        await self._publish(self.version)
        self.parts.events.state("part", "the servers have the first weights")
        if self.parts.run.resumed:
            await self._go_on(state, restored.next_order)
        self.saver.goes_on()
        await claim(queue, PARTITION, self._batch_log.lineage)
        await self.buffer.start(self.version)
        await self.validations.open(self.step, state.validation)
        self.report.opened(self.step)

    def _computed_columns(self) -> list[str]:
        """What ranks write into rows: those of the life before, which may have been ahead of the checkpoint."""
        own = {TEACHER_FIELD} if self.config.distillation.on_servers else set()
        if self.update.reward_model is None:
            own |= set(WRITES["compute_rm_scores"])
        return sorted({name for names in WRITES.values() for name in names} - own)

    async def _go_on(self, state: TrainerState, known: int) -> None:
        """With the prompts that were out, whatever credit there is for them now."""
        await self.parts.queue.open_partition(PARTITION, tasks=[], max_groups=0)
        if restored := await self.saver.restore_rows(None if self.repeats else self.version):
            self.parts.events.state("part", f"{len(restored)} finished groups came back from the checkpoint")
        await self._reconcile(state, known)
        await self.parts.queue.open_partition(PARTITION, tasks=[], max_groups=self._credit)

    async def _reconcile(self, state: TrainerState, known: int) -> None:
        """Bring the queue in line with the checkpoint, where its journal lost its end or is gone: what was trained
        before the checkpoint leaves, what was unfinished and is not `known` (orders below it are) is issued again."""
        unfinished = set(state.outstanding)
        live = (await self.parts.queue.watch(PARTITION, -1)).groups
        done = [group.uid for group in live if group.order < state.next_order and group.order not in unfinished]
        if done:
            await self.parts.queue.drop(PARTITION, done, "trained before the checkpoint")
        await self.feeder.admit_orders([order for order in state.outstanding if order >= known])

    async def _checkpoint(self) -> None:
        goes_on = self.step < self.total_steps()
        await self.saver.save(self.step, self.validations.means, rows=goes_on)

    # --- small things -------------------------------------------------------------------------------------------

    def _groups_left(self, groups: list[Group]) -> None:
        self.report.left(groups)
        self.on_left(groups)

    async def give_credit(self, groups: int) -> None:
        """As many groups may be out from now on."""
        if groups != self._credit:
            self._credit = self.buffer.credit = groups
            await self.parts.queue.open_partition(PARTITION, tasks=[], max_groups=groups)

    async def _cancel_in_flight(self) -> None:
        """Their leases have ended already; an agent worker that does not hear of it finds out when it renews them."""
        while True:
            await self.parts.agents.cancel(PARTITION, await self._to_cancel.get())

    async def _admit_lost_prompts(self) -> None:
        while True:
            await self.feeder.admit_again(await self._to_admit_again.get())

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    async def _or_stopped(self, work: Awaitable[T]) -> T:
        """`work`, or Stopped as soon as `stop` is set; at once if it is, also where nothing would have to be waited
        for."""
        if self.stop.is_set():
            if asyncio.iscoroutine(work):
                work.close()
            raise Stopped
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Stopped
        finally:
            for each in (task, stop):
                if not each.done():
                    each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)
