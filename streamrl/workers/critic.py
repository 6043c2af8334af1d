"""The critic's ranks: a value for each response token, from the state before it is sampled."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamrl.single_controller.decorator import Dispatch, register
from streamrl.single_controller.metrics import Mean, Metric, Peak, Total
from streamrl.single_controller.worker import RankInfo
from streamrl.workers.contract import step_of
from streamrl.workers.engine.base import StepOutput
from streamrl.workers.engine.schedule import Schedule
from streamrl.workers.held_rows import rows_or_references
from streamrl.workers.preparation import mini_batch_rows
from streamrl.workers.row_store import RowStore
from streamrl.workers.settings import CriticSettings
from streamrl.workers.training_worker import Profile, Stopwatch, TrainingWorker, check_finite
from transfer_queue.metadata import KVBatchMeta

by_rows = rows_or_references("critic")


class CriticWorker(TrainingWorker):
    role = "critic"

    def __init__(
        self, rank: RankInfo, settings: CriticSettings, queue: dict[str, Any] | RowStore, profile: Profile | None = None
    ) -> None:
        super().__init__(rank, settings.reads, queue, profile)
        self.settings = settings
        self._schedule = Schedule.of(settings.critic.optim, settings.total_training_steps)

    @register(Dispatch.RANK_ZERO)
    def init_model(self) -> dict[str, Any]:
        """Load the model and connect to the queue. Facts about the model."""
        settings = self.settings
        return self._start("value_model", settings.critic.strategy, settings.engine, settings.peak_tflops)

    @by_rows
    def compute_values(self, batch: KVBatchMeta) -> dict[str, Metric]:
        """Write `values` f32[R] of the current weights."""
        watch = Stopwatch()
        rows, bytes_read = self._read(batch, "compute_values")
        values = self.engine.infer(rows, temperature=1.0, micro=self.settings.micro)["values"]
        check_finite(self.role, batch.keys, {"values": values})
        return {
            "data/bytes_read": Total(bytes_read),
            "data/bytes_written": Total(self._write(batch, {"values": values})),
            "timing_s/values": Peak(watch.total),
        }

    @by_rows
    def update_critic(self, batch: KVBatchMeta) -> dict[str, Metric]:
        """One optimizer step per mini-batch of `extra_info["mini_batch_size"]` prompts (and epoch)."""
        from streamrl.workers.losses import ValueLoss, loss_weights  # torch

        watch, info, critic = Stopwatch(), batch.extra_info or {}, self.settings.critic
        rows, bytes_read = self._read(batch, "update_critic")
        lr, steps, micro = self._schedule.at(step_of(info) - 1), [], self.settings.micro
        with watch("compute"), self._profiled(info):
            for _ in range(critic.ppo_epochs or 1):
                for indices in mini_batch_rows(batch.keys, info):
                    part, keys = rows.take(indices), [batch.keys[i] for i in indices]
                    if (weights := loss_weights(part, keys, critic, self.engine.all_sum)) is None:
                        continue
                    part.columns["loss_weights"] = weights
                    loss = ValueLoss(critic)
                    self._flops.trained(part.lengths)
                    steps.append(self.engine.train_batch(part, loss, lr=lr, temperature=1.0, micro=micro))
        return _step_metrics(steps, self.engine.dp_size) | {
            "critic/lr": Mean(lr),
            "data/bytes_read": Total(bytes_read),
            "timing_s/update_critic": Peak(watch.total),
            **self._utilisation("critic", watch.stages["compute"]),
        }


def _step_metrics(steps: list[StepOutput], dp_size: int) -> dict[str, Metric]:
    """Sums over this rank's tokens become means over all ranks' when the group merges them."""
    sums: dict[str, float] = {}
    for step in steps:
        for name, value in step.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    tokens = sums.get("tokens", 0.0)
    mean = sums.get("returns", 0.0) / tokens if tokens else 0.0
    return {
        "critic/vf_loss": Mean(sums.get("vf_loss", 0.0), len(steps) / dp_size),
        "critic/vf_clipfrac": Mean(sums.get("vf_clipfrac", 0.0), tokens),
        "critic/vpred_mean": Mean(sums.get("vpred", 0.0), tokens),
        "critic/vf_explained_var": Mean(_explained(sums, mean, tokens) * tokens, tokens),
        "critic/grad_norm": Mean(sum(step.grad_norm for step in steps if step.taken), sum(s.taken for s in steps)),
        "critic/optimizer_steps": Mean(sum(step.taken for step in steps)),
        "critic/steps_not_finite": Mean(sum(not np.isfinite(step.grad_norm) for step in steps)),
    }


def _explained(sums: dict[str, float], mean: float, tokens: float) -> float:
    """1 - mean squared error / variance of the returns, of this rank's tokens."""
    variance = sums.get("returns_squared", 0.0) / tokens - mean**2 if tokens else 0.0
    return 1.0 - sums.get("squared_error", 0.0) / tokens / variance if variance > 1e-12 else 0.0
