"""The policy's ranks.

    KVBatchMeta (this rank's keys) ──read the declared fields──► Rows ──engine──► columns back into the queue, metrics

Consumes references; reads exactly the fields in `READS`; writes those in `WRITES`; returns metrics that add up over
ranks. No token passes through the caller. Every method is collective: a rank whose share is empty takes part.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from streamrl.single_controller.decorator import Dispatch, register
from streamrl.single_controller.metrics import Mean, Metric, Peak, Total
from streamrl.single_controller.worker import RankInfo, Worker
from streamrl.weight_sync import WeightInfo, WeightStore
from streamrl.workers.batch import MicroBatching, Rows
from streamrl.workers.engine.base import Engine, StepOutput
from streamrl.workers.engine.registry import EngineRegistry
from streamrl.workers.engine.schedule import Schedule
from streamrl.workers.preparation import loss_masks, mask_metrics, mini_batch_rows, sizes, token_advantages
from streamrl.workers.row_store import RowStore, connect
from streamrl.workers.settings import ActorSettings, PiOld
from transfer_queue.metadata import KVBatchMeta

READS: dict[str, tuple[str, ...]] = {
    "compute_log_prob": ("input_ids",),
    "update_actor": ("input_ids", "response_mask", "rollout_log_probs"),
}
READS_IF: dict[str, tuple[str, ...]] = {"snapshot": ("old_log_probs",), "max_age": ("weight_versions",)}
"""Further fields of `update_actor`, by what asks for them."""
WRITES: dict[str, tuple[str, ...]] = {"compute_log_prob": ("old_log_probs", "entropy")}


def fields_read(method: str, pi_old: PiOld, max_age: int | None) -> list[str]:
    """What a rank reads of each of its rows. How long the response is, it knows from the tag `response_len`."""
    fields = list(READS[method])
    if method == "update_actor":
        fields += READS_IF["snapshot"] if pi_old == "snapshot" else ()
        fields += READS_IF["max_age"] if max_age is not None else ()
    return fields


class ActorWorker(Worker):
    """One rank. `queue` is the queue's address, or a store in this process (tests, `runtime=local`)."""

    def __init__(
        self, rank: RankInfo, settings: ActorSettings, queue: dict[str, Any] | RowStore, weights_dir: str = ""
    ) -> None:
        super().__init__(rank)
        self.settings = settings
        self._queue, self._weights_dir = queue, weights_dir
        self._store: RowStore | None = None
        self._engine: Engine | None = None
        optim = settings.actor.optim
        self._schedule = Schedule(
            optim.lr, optim.lr_scheduler_type, optim.lr_warmup_steps, settings.total_training_steps, optim.min_lr_ratio
        )

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the actor has no model yet: call init_model() first")
        return self._engine

    @register(Dispatch.RANK_ZERO)
    def init_model(self) -> dict[str, Any]:
        """Load the model and connect to the queue. Facts about the model."""
        self._store = connect(self._queue, f"actor-{self.rank.rank}")
        engine = EngineRegistry.get("language_model", self.settings.actor.strategy)(self.rank, self.settings.engine())
        facts = engine.initialize()
        self._engine = engine
        return facts

    # --- computing ------------------------------------------------------------------------------------------------

    @register(Dispatch.DP_COMPUTE)
    def compute_log_prob(self, batch: KVBatchMeta) -> dict[str, Metric]:
        """Write `old_log_probs` and `entropy` f32[R] of the current weights, cut to the response here."""
        began, info = time.perf_counter(), batch.extra_info or {}
        rows, bytes_read = self._read(batch, fields_read("compute_log_prob", self.settings.pi_old, None))
        found = self.engine.infer(rows, temperature=_temperature(info), micro=self._micro_batching())
        written = sum(values.nbytes for column in found.values() for values in column)
        if len(rows):
            tags = [{"old_log_probs_version": int(info["version"])} for _ in batch.keys] if "version" in info else None
            columns = {"old_log_probs": found["log_probs"], "entropy": found["entropy"]}
            self._rows().put(_partition(batch), batch.keys, columns, tags=tags, token=batch.token)
        return {
            "data/bytes_read": Total(bytes_read),
            "data/bytes_written": Total(written),
            "timing_s/old_log_prob": Peak(time.perf_counter() - began),
        }

    @register(Dispatch.DP_COMPUTE)
    def update_actor(self, batch: KVBatchMeta) -> dict[str, Metric]:
        """One optimizer step per mini-batch of `extra_info["mini_batch_size"]` prompts (and epoch).

        Of `extra_info`: advantages {key: scalar}, temperature (1.0), version (the one being trained; it sets the
        learning rate), staleness (mean age of the rows in versions), max_age (versions; absent: any age counts),
        excluded (keys that do not count).
        """
        watch, info = Stopwatch(), batch.extra_info or {}
        with watch("read"):
            fields = fields_read("update_actor", self.settings.pi_old, info.get("max_age"))
            rows, bytes_read = self._read(batch, fields)
        with watch("prepare"):
            metrics = self._prepare(rows, batch.keys, info)
            batches = mini_batch_rows(batch.keys, info)
            size = self.engine.all_sum(sizes(rows, batches))
        with watch("compute"):
            steps = self._steps(rows, batches, size, info)
        return (
            metrics
            | _step_metrics(steps, self.engine.world_size)
            | {
                "actor/lr": Mean(self._learning_rate(info)),
                "rows/trained": Total(len(rows)),
                "perf/total_num_tokens": Total(rows.tokens),
                "data/bytes_read": Total(bytes_read),
                "timing_s/update_actor": Peak(watch.total),
                **{f"actor/seconds/{stage}": Peak(seconds) for stage, seconds in watch.stages.items()},
            }
        )

    def _steps(self, rows: Rows, batches: list[list[int]], size: np.ndarray, info: dict[str, Any]) -> list[StepOutput]:
        """The optimizer steps. A mini-batch in which no token counts, on any rank, has none."""
        from streamrl.workers.losses import ActorLoss, MiniBatchSize  # torch

        settings, steps = self.settings, []
        skip = settings.skip_zero_advantage and not settings.actor.entropy_coeff
        lr = self._learning_rate(info)
        for _ in range(settings.actor.ppo_epochs):
            for indices, (tokens, sequences) in zip(batches, size, strict=True):
                if not tokens:
                    continue
                if skip:
                    indices = [i for i in indices if rows.columns["advantages"][i].any()]
                loss = ActorLoss(settings.actor, settings.correction, MiniBatchSize(float(tokens), float(sequences)))
                step = self.engine.train_batch(
                    rows.take(indices), loss, lr=lr, temperature=_temperature(info),
                    micro=self._micro_batching(),
                )  # fmt: skip
                steps.append(step)
        return steps

    def _micro_batching(self) -> MicroBatching:
        actor = self.settings.actor
        if actor.use_dynamic_bsz:
            return MicroBatching(max_tokens=actor.ppo_max_token_len_per_gpu)
        return MicroBatching(max_rows=actor.ppo_micro_batch_size_per_gpu)

    def _learning_rate(self, info: dict[str, Any]) -> float:
        """Of the schedule, for stale samples divided by their age if the configuration says so."""
        lr = self._schedule.at(int(info.get("version", 0)))
        return lr / max(1.0, float(info.get("staleness", 0.0))) if self.settings.actor.optim.staleness_aware else lr

    def _prepare(self, rows: Rows, keys: list[str], info: dict[str, Any]) -> dict[str, Metric]:
        """From what was read to what the loss needs, in place."""
        columns = rows.columns
        masks, versions = columns.pop("response_mask"), columns.pop("weight_versions", None)
        columns["loss_mask"] = loss_masks(keys, masks, versions, info)
        columns["advantages"] = token_advantages(keys, columns["loss_mask"], info)
        if self.settings.pi_old == "bypass":
            columns["old_log_probs"] = columns["rollout_log_probs"]
        return mask_metrics(masks, columns["loss_mask"], versions, info)

    def _read(self, batch: KVBatchMeta, fields: list[str]) -> tuple[Rows, int]:
        """This rank's rows and how many bytes they were."""
        if not batch.keys:
            return Rows([], [], {name: [] for name in fields if name != "input_ids"}), 0
        found = self._rows().get(_partition(batch), batch.keys, fields)
        columns = {name: [found[name][i] for i in range(len(batch.keys))] for name in fields}
        size = sum(values.nbytes for column in columns.values() for values in column)
        responses = [int(tag["response_len"]) for tag in batch.tags]
        input_ids = columns.pop("input_ids")
        for name, column in columns.items():
            for key, values, response in zip(batch.keys, column, responses, strict=True):
                if len(values) != response:
                    raise ValueError(f"row {key}: {name} has {len(values)} entries, its tag response_len is {response}")
        return Rows(input_ids, responses, columns), size

    def _rows(self) -> RowStore:
        if self._store is None:
            raise RuntimeError("the actor is not connected to the queue yet: call init_model() first")
        return self._store

    # --- weights --------------------------------------------------------------------------------------------------

    @register(Dispatch.RANK_ZERO)
    def publish_weights(self, version: int, weights_dir: str = "") -> WeightInfo | None:
        """Rank 0 writes the full weights as `version`; all ranks gather them."""
        began = time.perf_counter()
        state = dict(self.engine.full_state())
        if self.rank.rank:
            return None
        info = WeightStore(weights_dir or self._weights_dir).write(state, version)
        return WeightInfo(info.version, info.path, info.bytes, time.perf_counter() - began)

    @register(Dispatch.RANK_ZERO)
    def state_digest(self) -> str:
        """sha256 over names, shapes and bytes of the full weights: equal weights, equal digest, on any world size."""
        digest = hashlib.sha256()
        for name, tensor in self.engine.full_state():
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: str) -> None:
        """Weights, optimizer and generator states into `directory`, each rank its shard."""
        self.engine.save(directory)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: str) -> None:
        """The inverse, on any number of ranks."""
        self.engine.load(directory)

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._store is not None:
            self._store.close()
        self._engine = self._store = None


class Stopwatch:
    """Seconds by stage."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.stages: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.stages[stage] = time.perf_counter() - began

    @property
    def total(self) -> float:
        return time.perf_counter() - self._began


def _step_metrics(steps: list[StepOutput], world_size: int) -> dict[str, Metric]:
    """Sums over this rank's tokens become means over all ranks' when the group merges them."""
    sums: dict[str, float] = {}
    for step in steps:
        for name, value in step.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    per_step, tokens = len(steps) / world_size, sums.get("tokens", 0.0)
    of_steps = {"actor/pg_loss": "pg_loss", "actor/loss": "loss", "actor/entropy_loss": "entropy_loss"}
    of_tokens = {
        "actor/entropy": "entropy", "actor/ppo_kl": "ppo_kl", "actor/pg_clipfrac": "pg_clipfrac",
        "actor/pg_clipfrac_lower": "pg_clipfrac_lower", "rollout_corr/kl": "rollout_kl",
        "rollout_corr/k3_kl": "rollout_k3_kl", "training/rollout_probs_diff_mean": "rollout_probs_diff",
        "rollout_corr/rollout_is_mean": "rollout_is", "rollout_corr/rollout_is_ratio_fraction_high": "rollout_is_high",
    }  # fmt: skip
    metrics: dict[str, Metric] = {name: Mean(sums.get(key, 0.0), per_step) for name, key in of_steps.items()}
    metrics |= {
        name: Mean(sums.get(key, 0.0), tokens)
        for name, key in of_tokens.items()
        if not key.startswith("rollout_is") or key in sums
    }
    taken = [step.grad_norm for step in steps if step.taken]
    metrics["actor/grad_norm"] = Mean(sum(taken), len(taken))
    metrics["actor/optimizer_steps"] = Mean(len(taken))
    metrics["actor/computed/tokens"] = Total(sum(step.tokens for step in steps))
    return metrics


def _temperature(info: dict[str, Any]) -> float:
    value = float(info.get("temperature", 1.0))
    if value <= 0:
        raise ValueError(f"temperature={value}: log-probs need the temperature at which the rows were sampled, above 0")
    return value


def _partition(batch: KVBatchMeta) -> str:
    if batch.partition_id is None:
        raise ValueError(f"{batch} names no partition")
    return batch.partition_id
