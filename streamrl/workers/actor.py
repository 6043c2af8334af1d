"""The policy's ranks, with a reference policy, a teacher and a reward model beside it if there are such.

A batch of references comes in, is read, computed on and written back; see `training_worker`. The order of the stages
is the trainer's (streamrl.trainer.update), what they tell each other stands in `contract`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.rendering.chat import ChatTokenizer
from streamrl.algorithms.advantages import estimator, moments, whitened
from streamrl.recording.record import RecordWriter
from streamrl.recording.samples import FIELDS, SampleOrder, write_samples
from streamrl.single_controller.decorator import Dispatch, Execute, register
from streamrl.single_controller.metrics import Low, Mean, Metric, Peak, Total
from streamrl.single_controller.worker import RankInfo
from streamrl.weight_sync import WeightInfo
from streamrl.weight_sync.publisher import Publisher, publisher
from streamrl.weight_sync.ranks import GroupRanks
from streamrl.workers.batch import MicroBatching, Rows
from streamrl.workers.contract import step_of
from streamrl.workers.engine.base import Engine, StepOutput, Weights
from streamrl.workers.engine.registry import EngineRegistry
from streamrl.workers.engine.schedule import Schedule
from streamrl.workers.engine.settings import EngineSettings
from streamrl.workers.held_rows import rows_or_references
from streamrl.workers.preparation import (
    flat_stats,
    loss_masks,
    mask_metrics,
    mini_batch_rows,
    session_rewards,
    token_advantages,
)
from streamrl.workers.row_store import RowStore
from streamrl.workers.settings import ActorSettings
from streamrl.workers.step_metrics import Measured, step_metrics
from streamrl.workers.training_worker import (
    Profile,
    Stopwatch,
    TrainingWorker,
    check_finite,
    device_memory,
    temperature_of,
)
from transfer_queue.metadata import KVBatchMeta

HUGGINGFACE = "huggingface"
"""The directory of `save_contents=[..., hf_model]` in the actor's part of a checkpoint: verl's name."""

by_rows = rows_or_references("actor")


class ActorWorker(TrainingWorker):
    role = "actor"

    def __init__(
        self, rank: RankInfo, settings: ActorSettings, queue: dict[str, Any] | RowStore, weights_dir: str = "",
        record_dir: str = "", profile: Profile | None = None,
    ) -> None:  # fmt: skip
        """`record_dir`: where the rows trained are kept; empty: nowhere."""
        super().__init__(rank, replace(settings.reads, record=bool(record_dir)), queue, profile)
        self.settings = settings
        self._weights_dir = weights_dir
        self._recorder = RecordWriter(Path(record_dir), rank.rank) if record_dir else None
        self._reference: Engine | None = None
        self._teacher: Engine | None = None
        self._scorer: Engine | None = None
        self._publishers: dict[str, Publisher] = {}
        self._schedule = Schedule.of(settings.actor.optim, settings.total_training_steps)

    @register(Dispatch.RANK_ZERO)
    def init_model(self) -> dict[str, Any]:
        """Load the model (and the reference's) and connect to the queue. Facts about the model."""
        settings = self.settings
        facts = self._start("language_model", settings.actor.strategy, settings.engine, settings.peak_tflops)
        self._reference, self._teacher = self._frozen(settings.reference), self._frozen(settings.teacher)
        self._scorer = self._frozen(settings.scorer, "reward_model")
        return facts

    def _frozen(self, settings: EngineSettings | None, kind: str = "language_model") -> Engine | None:
        """A further model beside the policy, if there is one."""
        if settings is None:
            return None
        engine: Engine = EngineRegistry.get(kind, self.settings.actor.strategy)(self.rank, settings)
        engine.initialize()
        return engine

    # --- log-probs ------------------------------------------------------------------------------------------------

    @by_rows
    def compute_log_prob(self, batch: KVBatchMeta) -> dict[str, Metric]:
        """Write `old_log_probs` and `entropy` f32[R] of the current weights, cut to the response here."""
        info = batch.extra_info or {}
        tags = [{"old_log_probs_version": int(info["version"])} for _ in batch.keys] if "version" in info else None
        weights: Weights = "snapshot" if info.get("snapshot") else "current"
        return self._infer(
            batch, self.role, "compute_log_prob", "old_log_prob", self.engine, self.settings.micro,
            {"log_probs": "old_log_probs", "entropy": "entropy"}, tags=tags, weights=weights, mfu="actor_infer",
        )  # fmt: skip

    @by_rows
    def compute_ref_log_prob(self, batch: KVBatchMeta) -> dict[str, Metric]:
        """Write `ref_log_prob` f32[R] of the reference: the frozen copy, or the actor without its adapters."""
        if self._reference is None and self.settings.model.lora_rank == 0:
            raise RuntimeError("this actor has no reference policy; it needs settings with use_kl_loss or a KL penalty")
        engine, weights = (self.engine, "reference") if self._reference is None else (self._reference, "current")
        return self._infer(
            batch, "reference", "compute_ref_log_prob", "ref", engine, self.settings.ref_micro,
            {"log_probs": "ref_log_prob"}, weights=weights,
        )  # fmt: skip

    @by_rows
    def compute_teacher_log_prob(self, batch: KVBatchMeta) -> dict[str, Metric]:
        """Write `teacher_log_prob` f32[R] of the teacher that the policy is to follow."""
        if self._teacher is None:
            raise RuntimeError(
                "this actor has no teacher; it needs settings with distillation.enabled and placement=ranks"
            )
        return self._infer(
            batch, "teacher", "compute_teacher_log_prob", "teacher", self._teacher, self.settings.teacher_micro,
            {"log_probs": "teacher_log_prob"},
        )  # fmt: skip

    def _infer(
        self, batch: KVBatchMeta, role: str, method: str, stage: str, engine: Engine, micro: MicroBatching,
        columns: dict[str, str], *, tags: list[dict[str, Any]] | None = None, weights: Weights = "current",
        mfu: str = "",
    ) -> dict[str, Metric]:  # fmt: skip
        """`mfu`: the name of the utilisation, of a stage of the trained model that has one."""
        watch = Stopwatch()
        rows, bytes_read = self._read(batch, method)
        with watch("compute"):
            found = engine.infer(rows, temperature=temperature_of(batch.extra_info or {}), micro=micro, weights=weights)
        if mfu:
            self._flops.inferred(rows.lengths)
        outputs = {column: found[name] for name, column in columns.items()}
        check_finite(role, batch.keys, outputs)
        written = self._write(batch, outputs, tags)
        return {
            "data/bytes_read": Total(bytes_read),
            "data/bytes_written": Total(written),
            f"timing_s/{stage}": Peak(watch.total),
            **(self._utilisation(mfu, watch.stages["compute"]) if mfu else {}),
        }

    @register(Dispatch.ONE_TO_ALL)
    def keep_snapshot(self) -> None:
        """Keep the current weights as those of pi_old, for `compute_log_prob` with `snapshot`."""
        self.engine.snapshot()

    # --- rewards and advantages -----------------------------------------------------------------------------------

    @by_rows
    def compute_rm_scores(self, batch: KVBatchMeta) -> dict[str, Any]:
        """Write `rm_scores` f32[R], the reward model's score of the row on its last sampled token.

        Returns {"scores": {key: score, 8 bytes}, "metrics": ...}.
        """
        if self._scorer is None:
            raise RuntimeError("this actor has no reward model; it needs settings with reward.reward_model.enable")
        watch = Stopwatch()
        rows, bytes_read = self._read(batch, "compute_rm_scores")
        masks = rows.columns.pop("response_mask")
        found = self._scorer.infer(rows, temperature=1.0, micro=self.settings.scorer_micro)["scores"]
        check_finite("reward model", batch.keys, {"scores": found})
        scores = {key: float(score[0]) for key, score in zip(batch.keys, found, strict=True)}
        written = self._write(batch, {"rm_scores": _f32(session_rewards(batch.keys, masks, scores))})
        metrics: dict[str, Metric] = {
            "data/bytes_read": Total(bytes_read),
            "data/bytes_written": Total(written),
            "timing_s/reward_model": Peak(watch.total),
        }
        return {"scores": scores, "metrics": metrics}

    @by_rows
    def compute_rewards(self, batch: KVBatchMeta) -> dict[str, Any]:
        """Write `token_level_rewards` f32[R], the score on the last sampled token less kl_coef times the KL of each.

        Returns {"penalty": {key: what that took from the row, 8 bytes}, "kl": sum over rows of their mean KL per token,
        "rows": how many rows have a token that counts}.
        """
        from streamrl.algorithms.kl_reward import penalised_rewards  # torch

        info = batch.extra_info or {}
        rows, _ = self._read(batch, "compute_rewards")
        masks, columns = rows.columns["response_mask"], rows.columns
        scores = session_rewards(batch.keys, masks, info["scores"])
        rewards, (kl, counting) = penalised_rewards(
            scores, columns[self._reads.old], columns["ref_log_prob"], masks,
            coef=float(info["kl_coef"]), estimator=self.settings.algorithm.kl_penalty,
        )  # fmt: skip
        self._write(batch, {"token_level_rewards": _f32(rewards)})
        taken = [float(s.sum() - r.sum()) for s, r in zip(scores, rewards, strict=True)]
        return {"penalty": dict(zip(batch.keys, taken, strict=True)), "kl": float(kl), "rows": float(counting)}

    @by_rows
    def compute_advantage(self, batch: KVBatchMeta) -> dict[str, Metric]:
        """Write `advantages`, `returns` and `loss_mask` f32[R], for estimators that work on tokens or are whitened
        over the loss tokens of the whole batch."""
        watch, info, algorithm = Stopwatch(), batch.extra_info or {}, self.settings.algorithm
        rows, bytes_read = self._read(batch, "compute_advantage")
        masks, columns = rows.columns["response_mask"], rows.columns
        loss = loss_masks(batch.keys, masks, columns.get("weight_versions"), info)
        found = estimator(algorithm.adv_estimator)
        if found.per_token is not None:
            rewards = columns.get("token_level_rewards") or session_rewards(batch.keys, masks, info["scores"])
            advantages, returns = found.tokens(
                rewards, masks, columns.get("values"), gamma=algorithm.gamma, lam=algorithm.lam
            )
        else:
            advantages = returns = token_advantages(batch.keys, masks, info)
        if found.whiten:
            advantages = whitened(advantages, loss, self.engine.all_sum(moments(advantages, loss)))
        written = self._write(
            batch, {"advantages": _f32(advantages), "returns": _f32(returns), "loss_mask": _f32(loss)}
        )  # fmt: skip
        return {
            **flat_stats("critic/advantages", advantages, loss),
            **flat_stats("critic/returns", returns, loss),
            **(flat_stats("critic/values", columns["values"], loss) if "values" in columns else {}),
            **mask_metrics(masks, loss, columns.get("weight_versions"), info),
            "data/bytes_read": Total(bytes_read),
            "data/bytes_written": Total(written),
            "timing_s/adv": Peak(watch.total),
        }

    # --- training -------------------------------------------------------------------------------------------------

    @by_rows
    def update_actor(self, batch: KVBatchMeta) -> dict[str, Metric]:
        """One optimizer step per mini-batch of `extra_info["mini_batch_size"]` prompts (and epoch)."""
        watch, info = Stopwatch(), batch.extra_info or {}
        with watch("read"):
            rows, bytes_read = self._read(batch, "update_actor")
        if self._recorder is not None:
            with watch("record"):
                self._record(self._recorder, rows, batch)
        with watch("prepare"):
            metrics = self._prepare(rows, batch.keys, info)
            batches = mini_batch_rows(batch.keys, info)
        with watch("compute"), self._profiled(info):
            steps, corrections = self._steps(rows, batch.keys, batches, info)
        return (
            metrics
            | step_metrics(steps, corrections, self.engine.dp_size)
            | {
                "actor/lr": Mean(self._learning_rate(info)),
                "rows/trained": Total(len(rows)),
                "perf/total_num_tokens": Total(rows.tokens),
                "global_seqlen/mean": Mean(rows.tokens),
                "global_seqlen/balanced_max": Peak(rows.tokens),
                "global_seqlen/balanced_min": Low(rows.tokens),
                **device_memory(),
                **self._utilisation("actor", watch.stages["compute"]),
                "data/bytes_read": Total(bytes_read),
                "timing_s/update_actor": Peak(watch.total),
                **{f"actor/seconds/{stage}": Peak(seconds) for stage, seconds in watch.stages.items()},
            }
        )

    def _record(self, recorder: RecordWriter, rows: Rows, batch: KVBatchMeta) -> None:
        """Keep the rows as they were sampled; what was read for that alone goes again."""
        info = batch.extra_info or {}
        if self.engine.collects:
            columns = {"input_ids": rows.input_ids, **rows.columns}
            recorder.write(step_of(info), batch.keys, batch.tags, columns)
        needed = replace(self._reads, record=False).of("update_actor", info)
        rows.columns = {name: column for name, column in rows.columns.items() if name in needed}

    def _prepare(self, rows: Rows, keys: list[str], info: dict[str, Any]) -> dict[str, Metric]:
        """From what was read to what the loss needs, in place."""
        columns = rows.columns
        if self._reads.old:
            columns["old_log_probs"] = columns[self._reads.old]
        if "advantages" in columns:
            return {}
        masks, versions = columns.pop("response_mask"), columns.pop("weight_versions", None)
        columns["loss_mask"] = loss_masks(keys, masks, versions, info)
        columns["advantages"] = token_advantages(keys, columns["loss_mask"], info)
        return mask_metrics(masks, columns["loss_mask"], versions, info)

    def _steps(
        self, rows: Rows, keys: list[str], batches: list[list[int]], info: dict[str, Any]
    ) -> tuple[list[StepOutput], list[Measured]]:
        """The optimizer steps, and what the correction measured on each mini-batch. A mini-batch in which no token
        counts, on any rank, has no step."""
        from streamrl.workers.losses import loss_weights  # torch

        steps: list[StepOutput] = []
        corrections: list[Measured] = []
        for epoch in range(self.settings.actor.ppo_epochs):
            for indices in batches:
                here = [keys[i] for i in indices]
                part, measured = self._corrected(rows.take(indices), here, info, epoch)
                corrections.append(measured)
                if (weights := loss_weights(part, here, self.settings.actor, self.engine.all_sum)) is None:
                    continue
                part.columns["loss_weights"] = weights
                steps.append(self._step(part, info))
        return steps, corrections

    def _step(self, rows: Rows, info: dict[str, Any]) -> StepOutput:
        from streamrl.workers.losses import ActorLoss  # torch

        settings = self.settings
        if settings.skip_zero_advantage and settings.only_advantages_have_gradient:
            rows = rows.take([i for i, values in enumerate(rows.columns["advantages"]) if values.any()])
        self._flops.trained(rows.lengths)
        loss = ActorLoss(
            settings.actor, settings.loss_mode, settings.distillation, old_is_current=not self._reads.old
        )  # fmt: skip
        step = self.engine.train_batch(
            rows, loss, lr=self._learning_rate(info), temperature=temperature_of(info), micro=settings.micro
        )
        return replace(step, peaks={name: value.item() for name, value in loss.peaks.items()})

    def _corrected(self, rows: Rows, keys: list[str], info: dict[str, Any], epoch: int) -> tuple[Rows, Measured]:
        """A mini-batch with what is decided about its tokens before its forward, and what that tells the metrics."""
        from streamrl.workers.correction import Correction, select_tokens  # torch

        settings, reference = self.settings, "old_log_probs"
        if settings.needs_current:
            reference = "current_log_probs"
            self._flops.inferred(rows.lengths)
            rows.columns[reference] = self.engine.infer(rows, temperature=temperature_of(info), micro=settings.micro)[
                "log_probs"
            ]
        measured = Correction(settings.algorithm.rollout_correction).apply(rows, reference, self.engine.all_sum)
        if settings.selects_tokens:
            seed = settings.seed + 1_000_003 * int(info.get("version", 0)) + epoch
            rows.columns["selected"] = select_tokens(settings.actor, rows, keys, reference, self.engine, seed=seed)
        rows.columns.pop("current_log_probs", None)
        return rows, measured

    def _learning_rate(self, info: dict[str, Any]) -> float:
        """Of the schedule, for stale samples divided by their age if the configuration says so."""
        lr = self._schedule.at(int(info.get("version", 0)))
        return lr / max(1.0, float(info.get("staleness", 0.0))) if self.settings.actor.optim.staleness_aware else lr

    @register(Dispatch.RANK_ZERO, Execute.RANK_ZERO)
    def write_samples(self, order: SampleOrder) -> list[dict[str, Any]]:
        """Rank 0 reads the rows and writes what was said in them; the answers to show."""
        model = self.settings.model
        chat = ChatTokenizer.from_pretrained(model.tokenizer_path or model.path)
        columns = self._rows().get(order.partition, [order.keys[i] for i in order.wanted], FIELDS)
        return write_samples(order, columns, chat)

    # --- weights --------------------------------------------------------------------------------------------------

    def _save(self, directory: str) -> None:
        super()._save(directory)
        self._model_writer(directory, copy=False)()

    def _hold(self, directory: str) -> Callable[[], None]:
        shards, model = super()._hold(directory), self._model_writer(directory, copy=True)

        def write() -> None:
            shards()
            model()

        return write

    def _model_writer(self, directory: str, *, copy: bool) -> Callable[[], None]:
        """The checkpoint as a Hugging Face model, if that is asked for: all ranks gather the weights, and what is
        returned writes them on rank 0."""
        if "hf_model" not in self.settings.actor.checkpoint.save_contents:
            return lambda: None
        from streamrl.workers.engine.hf_model import write_model  # torch

        model = self.settings.model
        state = {name: tensor.clone() if copy else tensor for name, tensor in self.engine.full_state()}

        def write() -> None:
            if self.rank.rank == 0:
                write_model(model.path, model.tokenizer_path or model.path, state, Path(directory) / HUGGINGFACE)

        return write

    @register(Dispatch.RANK_ZERO)
    def publish_weights(self, version: int, weights_dir: str = "") -> WeightInfo | None:
        """All ranks make `version` complete, each its share (streamrl.weight_sync). Raises FloatingPointError where the
        training has diverged, WeightError."""
        from streamrl.weight_sync.shares import cast  # torch

        directory = weights_dir or self._weights_dir
        if directory not in self._publishers:
            ranks = GroupRanks(self.rank.rank, self.engine.world_size)
            self._publishers[directory] = publisher(
                self.settings.weight_sync, directory, ranks, self.rank.rendezvous
            )  # fmt: skip
        shares = cast(self.engine.shares(), self.settings.weight_sync.dtype)
        return self._publishers[directory].publish(shares, version)

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, path: str) -> None:
        """Broadcast a version that was published by `collective`, to the servers that `path` counts. Raises
        WeightsMissing, RuntimeError (a server is gone)."""
        from streamrl.weight_sync.collective import Sender  # torch

        for each in self._publishers.values():
            if isinstance(each, Sender):
                each.send(path)
                return
        raise RuntimeError(f"nothing is held to be broadcast: weight_sync is {self.settings.weight_sync.backend}")

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        for each in self._publishers.values():
            each.close()
        self._publishers.clear()
        for engine in (self._reference, self._teacher, self._scorer):
            if engine is not None:
                engine.close()
        self._reference = self._teacher = self._scorer = None
        super().close()


def _f32(rows: list[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(values, np.float32) for values in rows]
