"""`actor_rollout_ref.{model,actor,ref}.*` and `critic.*`: what is trained, by which loss, on what engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from streamrl.config.sections.types import (
    Beta,
    EveryOrNever,
    Fraction,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KLEstimator = Literal[
    "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs+", "k2+", "mse+", "k3+", "low_var_kl+"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    path: str = ""
    """A directory that `transformers` can load: config.json, safetensors weights, tokenizer."""
    tokenizer_path: str | None = None
    """None: the model's directory."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: a third more arithmetic, a fraction of the memory."""
    use_remove_padding: bool = True
    """Pack the rows of a micro-batch one after the other, without padding; attention stays within each row."""
    lora_rank: NonNegativeInt = 0
    """Train low-rank adapters (peft) and keep the base frozen; 0: train all weights."""
    lora_alpha: PositiveInt = 16
    """The adapters are scaled by lora_alpha / lora_rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Modules that get adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPConfig:
    """How a model lies on its ranks."""

    param_offload: bool = False
    """Parameters lie in CPU memory and come to the device for each layer."""
    optimizer_offload: bool = False
    """Optimizer states lie in CPU memory between steps."""
    reshard_after_forward: bool | None = None
    """Free gathered parameters between forward and backward: less memory, more communication. None: for models of more
    than 200 M parameters."""
    model_dtype: Literal["fp32", "fp64"] = "fp32"
    """Of master weights, gradients and optimizer; fp64 is for comparing layouts of ranks digit by digit."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What the model computes in; None: bfloat16 on GPUs, float32 on CPUs (where bfloat16 was slower)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW."""

    lr: LearningRate = 1e-6
    weight_decay: NonNegativeFloat = 0.01
    lr_warmup_steps: EveryOrNever = -1
    """Linear from 0; -1: by lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Warm-up as a share of all steps."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: Fraction = 0.0
    """Where cosine ends, as a share of lr."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    staleness_aware: bool = False
    """Divide the rate by max(1, mean age of the samples in versions): k steps on samples of one policy are then no
    larger than one step. Zhang et al. 2016, Staleness-aware Async-SGD, https://arxiv.org/abs/1511.05950."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig:
    loss_mode: str = "vanilla"
    """A registered policy loss (docs/algorithms.md) or `path/to/file.py:function`."""
    clip_cov_ratio: Fraction = 0.0002
    """clip_cov: the share of tokens whose gradient is cut."""
    clip_cov_lb: float = 1.0
    """clip_cov: of those with a covariance of log-prob and advantage between these two."""
    clip_cov_ub: float = 5.0
    kl_cov_ratio: Fraction = 0.0002
    """kl_cov: the share of tokens, those of highest covariance, that get a KL penalty."""
    ppo_kl_coef: NonNegativeFloat = 0.1
    """kl_cov: its weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimActorConfig:
    """Times of strategy=sim, in seconds."""

    step_seconds: NonNegativeFloat = 0.05
    """Of an optimizer step, whatever is in it."""
    token_seconds: NonNegativeFloat = 1e-5
    """Of forward and backward, per token."""
    publish_seconds: NonNegativeFloat = 0.02
    save_seconds: NonNegativeFloat = 0.0
    """Of writing a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    save_contents: tuple[Literal["model", "optimizer", "extra", "hf_model"], ...] = ("model", "optimizer", "extra")
    """With hf_model each checkpoint also holds actor/huggingface, which transformers opens (`streamrl export` makes one
    later). The others are always saved, since a resume needs them."""
    async_save: bool = False
    """The ranks (the critic's too) copy what they save to host memory and write it while the training goes on; this
    takes as much host memory as weights and optimizer together. The checkpoint counts when all of it is on disk; the
    next one waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    strategy: Literal["fsdp", "fsdp2", "ddp", "sim"] = "fsdp"
    """fsdp and fsdp2 both mean FSDP2; ddp keeps the whole model on each rank; sim (runtime=local) has no model and only
    takes the time of one."""
    ppo_mini_batch_size: PositiveInt = 256
    """Prompts per optimizer step."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Tokens per micro-batch and rank; a longer row is a micro-batch of its own."""
    use_dynamic_bsz: bool = True
    """Cut micro-batches by tokens; false: by ppo_micro_batch_size_per_gpu."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows per micro-batch and rank, with use_dynamic_bsz=false."""
    ppo_epochs: PositiveInt = 1
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that share each row: every one holds a part of its tokens, and of the heads during attention."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    clip_ratio: PositiveFloat = 0.2
    clip_ratio_low: PositiveFloat | None = None
    """None: clip_ratio; so is clip_ratio_high."""
    clip_ratio_high: PositiveFloat | None = None
    clip_ratio_c: PositiveFloat = 3.0
    """Dual clip: the bound on the ratio where the advantage is negative; above 1."""
    target_kl: PositiveFloat | None = None
    """A mini-batch on which the policy has drifted further than this from the one that sampled it (mean over its tokens
    of the k3 estimate of KL(rollout || policy)) takes no optimizer step: what it would teach is no longer about this
    policy. PPO's early stopping, https://spinningup.openai.com/en/latest/algorithms/ppo.html. None: no limit."""
    loss_agg_mode: AggregationMode = "token-mean"
    loss_scale_factor: PositiveFloat | None = None
    """Of seq-mean-token-sum-norm; None: data.max_response_length."""
    entropy_coeff: NonNegativeFloat = 0.0
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(policy || reference) to the loss; the reference is the model as it was at the start."""
    kl_loss_coef: NonNegativeFloat = 0.001
    kl_loss_type: KLEstimator = "low_var_kl"
    """Of the KL per token (docs/algorithms.md); with "+" its value is the named one and its gradient that of k2."""
    tau_pos: PositiveFloat = 1.0
    """sapo: temperature of the gate where the advantage is positive."""
    tau_neg: PositiveFloat = 1.05
    grad_clip: PositiveFloat = 1.0
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sim: SimActorConfig = field(default_factory=SimActorConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefConfig:
    """The reference policy: with LoRA the actor without its adapter, else a frozen copy. It exists when
    actor.use_kl_loss or algorithm.use_kl_in_reward asks for it."""

    log_prob_max_token_len_per_gpu: PositiveInt | None = None
    """Tokens per micro-batch; None: the actor's."""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows per micro-batch, with log_prob_use_dynamic_bsz=false."""
    log_prob_use_dynamic_bsz: bool | None = None
    """None: the actor's."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticModelConfig:
    path: str | None = None
    """None: the actor's. Its head is replaced by a new one with a single output, unless the model has such a one."""
    enable_gradient_checkpointing: bool = True
    use_remove_padding: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptimConfig(OptimConfig):
    lr: LearningRate = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    enable: bool | None = None
    """None: when algorithm.adv_estimator needs values (gae)."""
    strategy: Literal["fsdp", "fsdp2", "ddp"] = "fsdp"
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step; None: the actor's."""
    ppo_max_token_len_per_gpu: PositiveInt = 32768
    use_dynamic_bsz: bool = True
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    ppo_epochs: PositiveInt | None = None
    """None: the actor's."""
    cliprange_value: PositiveFloat = 0.5
    """How far a value may move from the one that the advantages were made with before its loss is clipped."""
    loss_agg_mode: AggregationMode = "token-mean"
    loss_scale_factor: PositiveFloat | None = None
    """Of seq-mean-token-sum-norm; None: data.max_response_length."""
    grad_clip: PositiveFloat = 1.0
    ulysses_sequence_parallel_size: PositiveInt = 1
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
