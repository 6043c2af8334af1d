"""What an actor's ranks are told at their construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from streamrl.config.root import StreamRLConfig
from streamrl.config.sections.actor import ActorConfig, ModelConfig
from streamrl.config.sections.algorithm import RolloutCorrectionConfig
from streamrl.errors import ConfigError
from streamrl.workers.engine.settings import EngineSettings, LoRASettings

PiOld = Literal["bypass", "snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSettings:
    """The parts of a run's configuration that a rank of the actor needs, after `derive`."""

    model: ModelConfig
    actor: ActorConfig = field(default_factory=ActorConfig)
    correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    total_training_steps: int | None = None
    """The horizon of a decaying learning rate."""
    seed: int = 42
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in; master weights, gradients and optimizer are float32."""
    skip_zero_advantage: bool = True
    """Leave rows whose advantage is 0 out of forward and backward: exact, since they have no gradient while there is no
    entropy bonus (they stay in the denominators). Once most groups are all right or all wrong it is most of the work.
    The policy's figures (entropy, KL, clip shares) then range over the rows computed."""
    reshard_after_forward: bool | None = None
    """Free gathered parameters between forward and backward, and reduce gradients once per micro-batch: less memory,
    more communication. None: only for models too large to stay gathered."""

    def __post_init__(self) -> None:
        if self.correction.bypass_mode and self.correction.rollout_is is not None:
            raise ConfigError(
                f"algorithm.rollout_correction.rollout_is={self.correction.rollout_is} has no effect with bypass_mode: "
                "the old policy is the rollout policy, so every weight is 1. Set bypass_mode=false or rollout_is=null"
            )

    @classmethod
    def of(cls, config: StreamRLConfig) -> ActorSettings:
        return cls(
            model=config.actor_rollout_ref.model,
            actor=config.actor_rollout_ref.actor,
            correction=config.algorithm.rollout_correction,
            total_training_steps=config.trainer.total_training_steps,
            seed=config.trainer.seed,
        )

    def engine(self) -> EngineSettings:
        """What the engine below is told."""
        model, actor = self.model, self.actor
        lora = LoRASettings(rank=model.lora_rank, alpha=model.lora_alpha, target_modules=model.target_modules)
        return EngineSettings(
            model_path=model.path, gradient_checkpointing=model.enable_gradient_checkpointing,
            packed=model.use_remove_padding, lora=lora if model.lora_rank else None, optim=actor.optim,
            grad_clip=actor.grad_clip, fsdp=actor.fsdp_config,
            sequence_parallel=actor.ulysses_sequence_parallel_size, target_kl=actor.target_kl,
            entropy_grad=actor.entropy_coeff > 0, seed=self.seed,
        )  # fmt: skip

    @property
    def pi_old(self) -> PiOld:
        """bypass: the rollout's own log-probs; snapshot: the column that `compute_log_prob` wrote."""
        return "bypass" if self.correction.bypass_mode else "snapshot"
