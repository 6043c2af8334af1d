"""From leased groups to new weights: the stages of an update, as far as the configuration asks for them.

    scores ──► old ──► ref ──► values ──► rewards ──► advantages ──► critic ──► actor
      │         │       │        │           │            │
      rm_scores   old_log_probs  ref_log_prob  values   token_level_rewards   advantages, returns, loss_mask     columns

Consumes: a leased batch, of which this process knows keys, scores, lengths and versions. Produces: columns that the
ranks write, new weights on the ranks, metrics. Estimators that work on sessions (GRPO and its kin) are computed here
from the scores and need none of the stages between `old` and `actor`; those that work on tokens run on the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from streamrl.algorithms.advantages import Estimator, estimator
from streamrl.algorithms.kl_control import KLController, kl_controller
from streamrl.config import StreamRLConfig
from streamrl.monitor.events import EventLog
from streamrl.trainer.parts import Actor, Critic
from streamrl.trainer.replay_buffer import LeasedBatch
from streamrl.trainer.reward_model import RewardModel
from streamrl.trainer.scores import Sessions, advantage_metrics, sessions_of
from transfer_queue.metadata import KVBatchMeta

MAX_WITHOUT_STEP = 3
"""Updates in a row, all of whose optimizer steps were left out, after which a run ends."""

Metrics = dict[str, float]
PiOld = Literal["current", "keep", "kept"]


@dataclass(slots=True)
class Work:
    """One update on its way through the stages."""

    batch: LeasedBatch
    sessions: Sessions
    step: int
    info: dict[str, Any]
    """`extra_info` of every call (streamrl.workers.contract)."""
    partition: str
    metrics: Metrics = field(default_factory=dict)

    def add(self, metrics: Metrics) -> None:
        """Of a further stage."""
        self.metrics = together(self.metrics, metrics)

    def meta(self, **more: Any) -> KVBatchMeta:
        """References to all rows that are trained, in dispatch order, with control information."""
        rows = [row for rows in self.sessions.rows for row in rows]
        meta = KVBatchMeta(
            keys=[row.key for row in rows], tags=[dict(row.tag) for row in rows],
            partition_id=self.partition, extra_info={**self.info, **more},
        )  # fmt: skip
        meta.token = self.batch.token
        return meta


def together(metrics: Metrics, further: Metrics) -> Metrics:
    """Of two stages; bytes add up over the stages."""
    added = {name: value + metrics.get(name, 0.0) for name, value in further.items() if name.startswith("data/bytes_")}
    return metrics | further | added


class Update:
    """Runs the stages. Between updates it holds the coefficient of the KL penalty, and for actor and critic how many
    updates in a row have taken no optimizer step."""

    def __init__(
        self, config: StreamRLConfig, actor: Actor, critic: Critic | None, events: EventLog, partition: str
    ) -> None:
        algorithm, parts = config.algorithm, config.actor_rollout_ref
        self.estimator: Estimator = estimator(algorithm.adv_estimator)
        control = algorithm.kl_ctrl
        self.kl: KLController = kl_controller(
            control.type, kl_coef=control.kl_coef, target_kl=control.target_kl, horizon=control.horizon
        )
        self._config, self._algorithm, self._actor, self._critic = config, algorithm, actor, critic
        self._events, self._partition = events, partition
        self.reward_model = RewardModel.of(config, actor)
        self._without_step = {"actor": 0, "critic": 0}
        self._recompute_old = algorithm.rollout_correction.old_policy == "snapshot"
        self._needs_ref = algorithm.use_kl_in_reward or parts.actor.use_kl_loss
        self._on_ranks = self.estimator.per_token is not None or self.estimator.whiten

    async def scored(self, batch: LeasedBatch, *, step: int) -> tuple[LeasedBatch, Metrics]:
        """The batch with the scores that count, and what that took; as it is, where its rows have them."""
        if self.reward_model is None:
            return batch, {}
        with self._events.span("reward_model", step=step):
            groups, metrics = await self.reward_model.scored(batch.groups, self._partition, batch.token)
        return replace(batch, groups=groups), metrics

    async def run(
        self, batch: LeasedBatch, *, step: int, version: int, max_age: int | None, staleness: float,
        max_masked_ratio: float = 1.0, pi_old: PiOld = "current",
    ) -> Metrics:  # fmt: skip
        """Train on `batch`, which is scored, in `step`, whose weights are `version`; the metrics of all stages.

        Where old log-probs are recomputed, they are those of the weights at the start of the step: the current ones,
        which are kept if further updates of the step follow, or else the ones kept.
        """
        config = self._config
        sessions = sessions_of(
            batch.groups, overlong=config.reward.overlong_buffer, max_response_length=config.data.max_response_length,
            components=config.algorithm.gdpo_reward_keys,
        )  # fmt: skip
        info = {
            "temperature": config.actor_rollout_ref.rollout.temperature, "step": step, "version": version,
            "staleness": staleness, "max_age": max_age, "ages": True, "max_masked_ratio": max_masked_ratio,
            "mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size,
        }  # fmt: skip
        work = Work(batch, sessions, step, info, self._partition)
        if self._recompute_old:
            with self._stage("old_log_prob", work):
                if pi_old == "keep":
                    await self._actor.keep_snapshot()
                work.add(await self._actor.compute_log_prob(work.meta(snapshot=pi_old == "kept")))
        if self._needs_ref:
            with self._stage("ref", work):
                work.add(await self._actor.compute_ref_log_prob(work.meta()))
        if config.distillation.on_ranks:
            with self._stage("teacher", work):
                work.add(await self._actor.compute_teacher_log_prob(work.meta()))
        if self._critic is not None:
            with self._stage("values", work):
                work.add(await self._critic.compute_values(work.meta()))
        await self._advantages(work)
        if self._critic is not None:
            with self._stage("update_critic", work):
                mini_batch = config.critic.ppo_mini_batch_size
                work.add(await self._critic.update_critic(work.meta(mini_batch_size=mini_batch)))
            self._check_steps("critic", work)
        if step > config.trainer.critic_warmup:
            with self._stage("train", work, rows=sum(map(len, sessions.rows))) as span:
                work.add(await self._actor.update_actor(work.meta()))
            work.metrics |= {"timing_s/update_actor": span.seconds, **self._kl_loss()}
            self._check_steps("actor", work)
        return work.metrics

    def _check_steps(self, role: str, work: Work) -> None:
        """Raises FloatingPointError when the gradient or the loss is never finite any more."""
        metrics = work.metrics
        lost = metrics.get(f"{role}/steps_not_finite", 0.0) > 0 and not metrics.get(f"{role}/optimizer_steps")
        self._without_step[role] = count = self._without_step[role] + 1 if lost else 0
        if count >= MAX_WITHOUT_STEP:
            look = {"actor": "policy loss, the advantages", "critic": "value loss, the returns"}[role]
            raise FloatingPointError(
                f"the {role}'s gradient or loss was not finite in the last {count} updates (step {work.step}): it "
                f"learns nothing any more. Look at the {look} and the learning rate"
            )

    async def _advantages(self, work: Work) -> None:
        """Into `info["advantages"]` (a scalar per row) or, on the ranks, into the rows' columns."""
        sessions, scores = work.sessions, work.sessions.scores
        if self._algorithm.use_kl_in_reward:
            with self._stage("reward", work):
                scores = await self._penalised(work)
        work.metrics |= {f"critic/rewards/{stat}": float(getattr(scores, stat)()) for stat in ("mean", "max", "min")}
        with self._stage("advantage", work):
            if self.estimator.per_session is not None:
                work.info["advantages"] = sessions.advantages(
                    self.estimator, norm_by_std=self._algorithm.norm_adv_by_std_in_grpo, scores=scores,
                    weights=self._algorithm.gdpo_reward_weights,
                )  # fmt: skip
                work.metrics |= advantage_metrics(sessions, work.info["advantages"])
            if self._on_ranks:
                work.add(await self._actor.compute_advantage(work.meta(scores=sessions.row_scores)))
                work.info["advantage_columns"] = True

    async def _penalised(self, work: Work) -> np.ndarray:
        """f64[N]: scores less the KL penalty, which the ranks compute and write per token. Adapts the coefficient."""
        coefficient = self.kl.coef
        penalty: dict[str, float] = {}
        kl, rows = 0.0, 0.0
        for part in await self._actor.compute_rewards(work.meta(scores=work.sessions.row_scores, kl_coef=coefficient)):
            penalty |= part["penalty"]
            kl, rows = kl + part["kl"], rows + part["rows"]
        mean_kl = kl / max(rows, 1.0)
        self.kl.update(mean_kl, int(rows))
        work.metrics |= {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coefficient}
        return work.sessions.scores - work.sessions.summed(penalty)

    def _kl_loss(self) -> Metrics:
        actor = self._config.actor_rollout_ref.actor
        return {"actor/kl_coef": actor.kl_loss_coef} if actor.use_kl_loss else {}

    @contextmanager
    def _stage(self, name: str, work: Work, **fields: Any) -> Iterator[Any]:
        with self._events.span(name, step=work.step, **fields) as span:
            yield span
