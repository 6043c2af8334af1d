"""`trainer.*`: how long, in which mode, where, and what is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from streamrl.config.sections.types import (
    Batches,
    EveryOrNever,
    Fraction,
    Name,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Scalar,
    Seed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateAsyncConfig:
    num_warmup_batches: Batches = 1.0
    """Batches of prompts that are out beside the one being trained; may be a fraction."""
    parameter_sync_step: PositiveInt = 4
    """Mini-batches trained per published weight version; times ppo_mini_batch_size it is the train_batch_size."""
    fixed_lag: bool = False
    """Train only when everything that is out is ready, so that every token is num_warmup_batches versions old: slow,
    and the same staleness on every machine. For measuring what staleness does to learning."""
    validation_weights: Literal["pin", "hold", "mixed"] | None = None
    """Which weights answer a validation beside training. pin: those of its step; validation_servers keep them meanwhile
    and serve nothing else. hold: those of its step; the servers get no new weights before it has ended, and training
    goes on as long as what is sampled meanwhile can be trained in time. mixed: those of its step and later ones. null:
    pin where there are more servers than validation_servers, else mixed."""
    validation_servers: PositiveInt = 1
    """Servers that pin takes out of generation for training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocateAsyncConfig:
    num_warmup_batches: Batches = 1.0
    """As in separate_async: what carries over a step. The time in which servers sleep does not count to
    rollout.agent.session_timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomSamplerConfig:
    path: str | None = None
    """A Python file with a class that chooses which ready groups are trained (docs/extending.md)."""
    name: str = "Sampler"
    """The class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    max_off_policy_threshold: PositiveInt | None = 8
    """Counts from 1: 1 is on-policy, k admits tokens k - 1 versions old; null: any age."""
    max_off_policy_strategy: Literal["drop", "wait", "mask"] | None = "drop"
    """drop: a group that is too old leaves, also while it is generated, and another prompt is issued; wait: the next
    version waits for what it would make too old, and nothing leaves; mask: tokens that are too old leave the loss, and
    a group of such tokens alone is dropped; null: the age is only measured."""
    max_masked_ratio: Fraction = 1.0
    """mask: a row of which a larger share is too old leaves the loss as a whole."""
    custom_sampler: CustomSamplerConfig = field(default_factory=CustomSamplerConfig)
    sampler_kwargs: dict[str, Scalar] = field(default_factory=dict)
    """Of its constructor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V1Config:
    trainer_mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """sync: generation and training take turns, every token is on-policy. colocate_async: they take turns on the same
    devices, and what is not finished carries over. separate_async: both go on all the time, on devices of their own."""
    colocate_async: ColocateAsyncConfig = field(default_factory=ColocateAsyncConfig)
    separate_async: SeparateAsyncConfig = field(default_factory=SeparateAsyncConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    total_training_steps: PositiveInt | None = None
    """None: total_epochs times the full batches in the dataset."""
    total_epochs: PositiveInt = 30
    project_name: Name = "streamrl"
    """Names the run directory, <runs_dir>/<time>-<project_name>-<experiment_name>, as far as they are given."""
    experiment_name: Name = "run"
    """Where neither is given, the model's directory names the run."""
    start_timeout: PositiveFloat = 180.0
    """Seconds for the training ranks to start. Those of servers: rollout.start_timeout."""
    nnodes: PositiveInt = 1
    n_gpus_per_node: PositiveInt = 1
    """Training ranks per node; with device=cpu a rank is one process with one thread."""
    device: Literal["cpu", "cuda"] = "cpu"
    peak_tflops: PositiveFloat | None = None
    """What the device of a rank promises (TFLOP/s), for perf/mfu/*. null: dense bfloat16 of the GPU by its name
    (streamrl/workers/flops.py); of one that is not known, and of a CPU, there is no perf/mfu/*."""
    save_freq: EveryOrNever = -1
    """Steps between checkpoints; -1 or 0: only one, of the last step."""
    max_actor_ckpt_to_keep: PositiveInt | None = 1
    """Checkpoints that stay when a new one is written; null: all. A resume goes on from the newest."""
    ckpt_keep_interval: PositiveInt | None = None
    """Those of steps that are a multiple of it stay besides, for good, also when the run goes on without the key."""
    ckpt_include_rows: Literal["auto", "always", "never"] = "auto"
    """Whether a checkpoint also holds the rows of groups that are finished and not trained yet, for a resume whose
    queue has lost them (with its node, or its directory), which then does not generate them again. auto: of the oldest
    groups as many as take 1 GiB; the trainer's process holds a copy until it is written."""
    test_freq: EveryOrNever = -1
    """Steps between validations; -1 or 0: only before and after."""
    val_before_train: bool = True
    val_only: bool = False
    """Validate actor_rollout_ref.model.path in a run of its own, and end (of a checkpoint: `streamrl export` first)."""
    rollout_data_dir: str | None = None
    """A directory for what the model said: <step>.jsonl with input, output, gts, score, step and what else the reward
    returned, of each row that was trained."""
    validation_data_dir: str | None = None
    """The same of each validation."""
    log_val_generations: NonNegativeInt = 0
    """Answers shown of each validation."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto: continue the newest unfinished run of this experiment that had the same configuration."""
    resume_from_path: str | None = None
    """A run directory; needs resume_mode=resume_path."""
    runs_dir: str = "runs"
    stall_timeout: PositiveFloat = 300.0
    """Seconds that the trainer waits for any progress of generation before it gives up and says who was stuck."""
    critic_warmup: NonNegativeInt = 0
    """Steps that train only the critic."""
    record: bool = False
    """Keep the trajectories that are trained in the run directory, for a replay."""
    replay: str | None = None
    """A run directory with recorded trajectories: its steps are trained again, without agents, servers, validation."""
    seed: Seed = 42
    deterministic: bool = False
    """The same weights and metrics, bit for bit, for any number of LLM servers and agent workers and after any kill:
    batches are of fixed prompts, sampled to their last token by the version num_warmup_batches before. Servers are
    slower for it; rewards, tools and agents must not depend on time or chance of their own (docs/deterministic.md)."""
    logger: tuple[str, ...] = ("console",)
    """Where metrics go besides metrics.jsonl ("file"), which every run writes: console (the terminal view),
    tensorboard, wandb, mlflow, trackio, swanlab, or a class of yours, path/to/file.py:Class (docs/metrics.md)."""
    v1: V1Config = field(default_factory=V1Config)

    @property
    def lag(self) -> int:
        """In deterministic mode: steps between the weights that sample a batch and those that are trained on it."""
        return round(self.v1.separate_async.num_warmup_batches) if self.v1.trainer_mode == "separate_async" else 0
