"""`actor_rollout_ref.model.*` and `actor_rollout_ref.actor.*`: the policy, its loss and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from streamrl.config.sections.types import (
    EveryOrNever,
    Fraction,
    NonNegativeFloat,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    path: str = ""
    """A directory that `transformers` can load: config.json, safetensors weights, tokenizer."""
    tokenizer_path: str | None = None
    """None: the model's directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW."""

    lr: PositiveFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.01
    lr_warmup_steps: EveryOrNever = -1
    """Linear from 0; -1: none."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: Fraction = 0.0
    """Where cosine ends, as a share of lr."""
    betas: tuple[OpenFraction, OpenFraction] = (0.9, 0.999)
    staleness_aware: bool = False
    """Divide the rate by max(1, mean age of the samples in versions): k steps on samples of one policy are then no
    larger than one step. Zhang et al. 2016, Staleness-aware Async-SGD, https://arxiv.org/abs/1511.05950."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig:
    loss_mode: Literal["vanilla"] = "vanilla"
    """vanilla: the clipped surrogate with a dual clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimActorConfig:
    """Times of strategy=sim, in seconds."""

    step_seconds: NonNegativeFloat = 0.05
    """Of an optimizer step, whatever is in it."""
    token_seconds: NonNegativeFloat = 1e-5
    """Of forward and backward, per token."""
    publish_seconds: NonNegativeFloat = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    strategy: Literal["fsdp", "fsdp2", "sim"] = "fsdp"
    """fsdp and fsdp2 both mean FSDP2; sim (runtime=local) has no model and only takes the time of one."""
    ppo_mini_batch_size: PositiveInt = 256
    """Prompts per optimizer step."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Tokens per micro-batch and rank; a longer row is a micro-batch of its own."""
    ppo_epochs: PositiveInt = 1
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
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    loss_scale_factor: PositiveFloat | None = None
    """Of seq-mean-token-sum-norm; None: data.max_response_length."""
    entropy_coeff: NonNegativeFloat = 0.0
    use_kl_loss: Literal[False] = False
    """A reference policy does not exist yet."""
    grad_clip: PositiveFloat = 1.0
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sim: SimActorConfig = field(default_factory=SimActorConfig)
