"""What the ranks are told at their construction: the parts of a run's configuration that they need, after `derive`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from streamrl.algorithms.advantages import estimator
from streamrl.config.root import StreamRLConfig
from streamrl.config.sections.actor import ActorConfig, CriticConfig, ModelConfig, RefConfig
from streamrl.config.sections.algorithm import AlgorithmConfig, DistillationConfig
from streamrl.config.sections.reward_model import RewardModelConfig
from streamrl.weight_sync.publisher import SyncSettings
from streamrl.workers.batch import MicroBatching
from streamrl.workers.contract import Reads
from streamrl.workers.engine.settings import EngineSettings, LoRASettings

PROPORTIONAL_TO_ADVANTAGE = frozenset({"vanilla", "gspo", "cispo", "geo_mean", "sapo", "gpg", "clip_cov"})
"""Policy losses that are 0 where the advantage is; kl_cov is not."""

OLD_COLUMN = {"bypass": "rollout_log_probs", "snapshot": "old_log_probs", "current": ""}
"""pi_old → the column of its log-probs; of the current policy there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSettings:
    model: ModelConfig
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    total_training_steps: int | None = None
    """The horizon of a decaying learning rate."""
    peak_tflops: float | None = None
    """Of the device; None: by its name."""
    seed: int = 42
    deterministic: bool = False
    weight_sync: SyncSettings = field(default_factory=SyncSettings)
    skip_zero_advantage: bool = True
    """Leave rows whose advantage is 0 out of forward and backward: exact, since they have no gradient while nothing but
    the advantages has one (they stay in the denominators). Once most groups are all right or all wrong it is most of
    the work. The policy's figures (entropy, KL, clip shares) then range over the rows computed."""

    @classmethod
    def of(cls, config: StreamRLConfig) -> ActorSettings:
        parts = config.actor_rollout_ref
        return cls(
            model=parts.model, actor=parts.actor, ref=parts.ref, algorithm=config.algorithm,
            distillation=config.distillation, reward_model=config.reward.reward_model,
            total_training_steps=config.trainer.total_training_steps, seed=config.trainer.seed,
            deterministic=config.trainer.deterministic, peak_tflops=config.trainer.peak_tflops,
            weight_sync=_sync(config),
        )  # fmt: skip

    @property
    def needs_reference(self) -> bool:
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def engine(self) -> EngineSettings:
        model, actor = self.model, self.actor
        adapters = LoRASettings(rank=model.lora_rank, alpha=model.lora_alpha, target_modules=model.target_modules)
        return EngineSettings(
            model_path=model.path, gradient_checkpointing=model.enable_gradient_checkpointing,
            packed=model.use_remove_padding, lora=adapters if model.lora_rank else None, optim=actor.optim,
            grad_clip=actor.grad_clip, fsdp=actor.fsdp_config, sequence_parallel=actor.ulysses_sequence_parallel_size,
            target_kl=actor.target_kl, entropy_grad=actor.entropy_coeff > 0, seed=self.seed,
            deterministic=self.deterministic,
        )  # fmt: skip

    @property
    def reference(self) -> EngineSettings | None:
        """Of the frozen copy; None where there is no reference, or it is the actor without its adapters."""
        if not self.needs_reference or self.model.lora_rank:
            return None
        return self._frozen(self.model.path)

    @property
    def teacher(self) -> EngineSettings | None:
        return self._frozen(self.distillation.teacher_model.path or "") if self.distillation.on_ranks else None

    @property
    def scorer(self) -> EngineSettings | None:
        """Of the reward model."""
        return self._frozen(self.reward_model.model_path or "") if self.reward_model.enable else None

    def _frozen(self, path: str) -> EngineSettings:
        return EngineSettings(
            model_path=path, packed=self.model.use_remove_padding, fsdp=self.ref.fsdp_config,
            sequence_parallel=self.actor.ulysses_sequence_parallel_size, seed=self.seed,
            deterministic=self.deterministic,
        )  # fmt: skip

    @property
    def micro(self) -> MicroBatching:
        actor = self.actor
        return micro_batching(
            actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
        )

    @property
    def ref_micro(self) -> MicroBatching:
        ref = self.ref
        return micro_batching(
            ref.log_prob_use_dynamic_bsz in (None, True),
            ref.log_prob_max_token_len_per_gpu or self.actor.ppo_max_token_len_per_gpu,
            ref.log_prob_micro_batch_size_per_gpu,
        )

    @property
    def teacher_micro(self) -> MicroBatching:
        return replace(self.micro, max_tokens=self.distillation.teacher_model.max_token_len_per_gpu)

    @property
    def scorer_micro(self) -> MicroBatching:
        return replace(self.micro, max_tokens=self.reward_model.max_token_len_per_gpu or self.micro.max_tokens)

    @property
    def reads(self) -> Reads:
        return Reads(
            old=OLD_COLUMN[self.algorithm.rollout_correction.old_policy],
            kl_loss=self.actor.use_kl_loss,
            kl_in_reward=self.algorithm.use_kl_in_reward,
            teacher=self.distillation.enabled,
            values="values" in estimator(self.algorithm.adv_estimator).needs,
        )

    @property
    def loss_mode(self) -> str:
        """With loss_type=reinforce plain REINFORCE, whose importance weights are those of the rollout correction."""
        return "gpg" if self.algorithm.rollout_correction.loss_type == "reinforce" else self.actor.policy_loss.loss_mode

    @property
    def selects_tokens(self) -> bool:
        from streamrl.algorithms.policy_losses import NEEDS_SELECTION  # torch: asked on the ranks only

        return self.loss_mode in NEEDS_SELECTION

    @property
    def needs_current(self) -> bool:
        """Whether log-probs of the current policy are needed before a mini-batch's step: without a snapshot there are
        no others to compare the rollout's with."""
        correction = self.algorithm.rollout_correction
        corrects = correction.rollout_is is not None or correction.rollout_rs is not None
        return correction.old_policy != "snapshot" and (corrects or self.selects_tokens)

    @property
    def only_advantages_have_gradient(self) -> bool:
        known = self.loss_mode in PROPORTIONAL_TO_ADVANTAGE  # of a user's own loss nothing is known
        return known and not (self.actor.entropy_coeff or self.actor.use_kl_loss or self.distillation.enabled)


def _sync(config: StreamRLConfig) -> SyncSettings:
    sync = config.actor_rollout_ref.rollout.weight_sync
    return SyncSettings(
        backend="shm" if sync.backend == "auto" else sync.backend, dtype=sync.dtype, staged=True,
        older=config.trainer.lag if config.trainer.deterministic else 0, keep=sync.keep, full_every=sync.full_every,
        bucket_bytes=sync.bucket_megabytes << 20,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    critic: CriticConfig
    total_training_steps: int | None = None
    seed: int = 42
    deterministic: bool = False
    peak_tflops: float | None = None

    @classmethod
    def of(cls, config: StreamRLConfig) -> CriticSettings:
        trainer = config.trainer
        return cls(
            critic=config.critic, total_training_steps=trainer.total_training_steps, seed=trainer.seed,
            deterministic=trainer.deterministic, peak_tflops=trainer.peak_tflops,
        )  # fmt: skip

    @property
    def engine(self) -> EngineSettings:
        critic = self.critic
        return EngineSettings(
            model_path=critic.model.path or "", gradient_checkpointing=critic.model.enable_gradient_checkpointing,
            packed=critic.model.use_remove_padding, optim=critic.optim, grad_clip=critic.grad_clip,
            fsdp=critic.fsdp_config, sequence_parallel=critic.ulysses_sequence_parallel_size, seed=self.seed,
            deterministic=self.deterministic,
        )  # fmt: skip

    @property
    def micro(self) -> MicroBatching:
        critic = self.critic
        return micro_batching(
            critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu
        )

    @property
    def reads(self) -> Reads:
        return Reads(old="rollout_log_probs", values=True)


def micro_batching(dynamic: bool, tokens: int, rows: int | None) -> MicroBatching:
    """By tokens, or by rows."""
    return MicroBatching(max_tokens=tokens, max_rows=None) if dynamic else MicroBatching(max_tokens=None, max_rows=rows)
