"""The whole configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from streamrl.config.sections.actor import ActorConfig, CriticConfig, ModelConfig, RefConfig
from streamrl.config.sections.algorithm import AlgorithmConfig, DistillationConfig, RewardConfig
from streamrl.config.sections.data import DataConfig
from streamrl.config.sections.rollout import RolloutConfig
from streamrl.config.sections.services import MonitorConfig, ProfilerConfig, RayKwargs, TransferQueueConfig
from streamrl.config.sections.trainer import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRolloutRefConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRLConfig:
    """Immutable. Made by `streamrl.config.load_config`, which checks it whole; all paths in it are absolute then."""

    runtime: Literal["ray", "local"] = "ray"
    """local: the same loop in one process, for a debugger."""
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    transfer_queue: TransferQueueConfig = field(default_factory=TransferQueueConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    global_profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    ray_kwargs: RayKwargs = field(default_factory=RayKwargs)
