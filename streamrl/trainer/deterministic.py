"""Deterministic mode (`trainer.deterministic`): who comes first decides nothing.

    step s:   trains the prompts of the dispatch orders [(s - 1)·P, s·P), each in its slot (trainer/slots.py),
              sampled to their last token by the weights after step s - 1 - lag (0 at least)

    after step t ──weights──► store (the last lag + 1 versions) ──┐ loaded in turn
       └──the slots of step t + 1 + lag──► queue ──► agents ──► servers: each request names its version
                                             └──watch──► a slot whose prompt ended untrained gets its next one

The same for any number of servers and agent workers, and after a kill at any point: what was generated before it is
kept, for it would come out again; what was half generated is forgotten and generated again, by the version it had,
which the checkpoint keeps.

It costs what the servers lose by turns between versions and by fixed shapes (rollout/torch/invariant.py), and the
tail of a batch, which no later one may overtake. Rewards, tools and agents must give the same for the same; a session
that ran into a time limit is not the same again.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from streamrl.trainer.checkpoint import TrainerState
from streamrl.trainer.loop import PARTITION, Trainer
from streamrl.trainer.parts import Parts
from streamrl.trainer.selection import Selection
from streamrl.trainer.slots import InTurn, Schedule, SlotFeeder
from streamrl.trainer.staleness import Measured
from streamrl.trainer.validation import Repeats
from streamrl.weight_sync.shared_memory import WeightStore
from transfer_queue.net.messages import Group

MACHINE_DEPENDENT = (
    "timing_s/", "timing_per_token_ms/", "perf/", "overlap/", "lost_s/", "queue/", "data/bytes_", "actor/seconds/",
    "agent_loop/", "tool_call_counts/", "sampling/", "waste/", "weights/rollout_version_min", "weights/bytes",
    "weights/seconds/", "rollout/",
    "groups/dropped", "training/filter_groups/", "training/rollout_failure/", "training/off_policy/evicted_samples",
)  # fmt: skip
"""How the names of metrics begin that are not the same again: times, loads, what is told of sessions by their own
events (a process killed meanwhile did not see them), and in which step it was seen that groups left untrained."""


def comparable(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Of a step's metrics those that come out again, bit for bit."""
    return {name: value for name, value in metrics.items() if not name.startswith(MACHINE_DEPENDENT)}


class DeterministicTrainer(Trainer):
    """In place of the modes: lag 0 is `sync`, a further one trains while the next batch is generated.

    Invariant: what a step trains, and in which order, is a function of the configuration and the seed.
    """

    staleness = Measured()
    repeats = True

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        self._schedule = Schedule(config.data.train_batch_size, config.trainer.lag)
        self._first_step = 1
        super().__init__(parts)
        self.feeder: SlotFeeder = SlotFeeder(
            parts.queue, parts.train_data, partition=PARTITION, n=config.actor_rollout_ref.rollout.n,
            chunk=max(1, self.mini_batch // 4), baseline="baseline" in self.update.estimator.needs,
            version_of=self._sampled_by,
        )  # fmt: skip
        self.validations.repeats = lambda label, step: Repeats(f"{label} {step}", self.version)
        if config.actor_rollout_ref.actor.strategy != "sim":  # whose versions have no files
            self.saver.more["weights"] = OlderWeights(parts.weights_dir, self._schedule.lag, lambda: self.version)

    def _selection(self) -> Selection:
        algorithm = self.config.algorithm
        return Selection(
            self.staleness, algorithm.filter_groups.enable, algorithm.gdpo_reward_keys, InTurn(self._next_order)
        )

    @property
    def max_outstanding(self) -> int:
        """No credit: the schedule bounds what is out."""
        return 0

    @property
    def groups_per_update(self) -> int:
        return self.groups_per_step if self.config.trainer.v1.trainer_mode == "sync" else self.mini_batch

    async def before_step(self) -> None:
        if self.step + 1 == self._first_step:
            for step in self._schedule.issued_after(self.step):
                self._issue(step)

    async def on_published(self) -> None:
        """Step `self.step + 1` is trained."""
        self.feeder.slots.trained(self._schedule.orders(self.step + 1))
        self._issue(self._schedule.issued_after(self.step + 1)[-1])

    def on_left(self, groups: list[Group]) -> None:
        self.feeder.left(group for group in groups if self._schedule.step_of(group.order) > self.step)

    def _issue(self, step: int) -> None:
        if step <= self.total_steps():
            self.feeder.fill(self.feeder.slots.missing(self._schedule.orders(step)))

    def _next_order(self) -> int:
        return self._schedule.orders(self._first_step)[0] + self.buffer.kept

    def _sampled_by(self, order: int) -> int:
        return self.version_of(self._schedule.sampled_after(self._schedule.step_of(order)))

    async def _reconcile(self, state: TrainerState, known: int) -> None:
        """What was trained before the checkpoint leaves; of what is to come the queue holds what is whole."""
        self._first_step = state.step + 1
        live = (await self.parts.queue.watch(PARTITION, -1)).groups
        done = [group.uid for group in live if self._schedule.step_of(group.order) <= state.step]
        if done:
            await self.parts.queue.drop(PARTITION, done, "trained before the checkpoint")
        self.feeder.resumed(group for group in live if self._schedule.step_of(group.order) > state.step)


class OlderWeights:
    """The weight versions below the newest that may still be asked for, in a checkpoint (trainer/saving.py)."""

    def __init__(self, weights_dir: Path, lag: int, version: Callable[[], int]) -> None:
        """`version`: the newest."""
        self._store, self._lag, self._version = WeightStore(weights_dir), lag, version

    async def save_checkpoint(self, directory: str, *, background: bool = False) -> None:
        newest = self._version()
        files = [self._store.path(version) for version in range(max(0, newest - self._lag), newest)]
        await asyncio.to_thread(_copy, files, Path(directory))

    async def checkpoint_written(self, *, timeout: float = 0.0) -> None: ...

    async def load_checkpoint(self, directory: str) -> None:
        await asyncio.to_thread(_bring_back, Path(directory), self._store)


def _bring_back(directory: Path, store: WeightStore) -> None:
    files = list(directory.glob("v*.safetensors"))
    store.forget_digests(*(file.name for file in files))
    _copy(files, store.directory)


def _copy(files: Iterable[Path], target: Path) -> None:
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in files:
        shutil.copy(file, target / file.name)
