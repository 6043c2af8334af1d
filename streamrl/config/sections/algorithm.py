"""`algorithm.*` and `reward.*`: from scores to advantages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from streamrl.config.sections.actor import KLEstimator
from streamrl.config.sections.reward_model import RewardModelConfig
from streamrl.config.sections.types import (
    Fraction,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    Scalar,
)

PiOld = Literal["bypass", "snapshot", "current"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionConfig:
    """What is done about the rollout policy not being the one that is trained (docs/algorithms.md)."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Weight the loss by old policy / rollout policy, per token or per row (the product over it); None: no weight."""
    rollout_is_threshold: PositiveFloat | str = 2.0
    """A number: weights are at most that (truncated). "low_high": tokens (rows) outside are left out (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the mini-batch."""
    rollout_rs: str | None = None
    """Reject by a statistic of the ratio: token_k1|k2|k3, seq_sum_k1|k2|k3, seq_mean_k1|k2|k3 (geometric),
    seq_max_k2|k3, or several with commas. What is rejected leaves `loss_mask`, and with it every denominator."""
    rollout_rs_threshold: PositiveFloat | str | None = None
    """Upper bound, or "low_high"; with several statistics one each, with commas."""
    bypass_mode: bool | None = None
    """True: the old policy is the one that generated (rollout_log_probs). None: by pi_old, else True in async modes."""
    pi_old: PiOld | None = None
    """What the ratio compares the policy with. bypass: the policy that generated. snapshot: the weights at the start of
    the step, whose log-probs are computed again. current: itself, so that the ratio is 1 and the gradient the plain
    policy gradient; no further forward, but one optimizer step per step and no trust region (see actor.target_kl).
    None: by bypass_mode."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """With bypass_mode: the policy loss as configured, or plain REINFORCE with the weights of rollout_is."""

    @property
    def old_policy(self) -> PiOld:
        return self.pi_old or ("bypass" if self.bypass_mode else "snapshot")


@dataclass(frozen=True, slots=True, kw_only=True)
class KLControlConfig:
    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: NonNegativeFloat = 0.001
    horizon: PositiveInt = 10_000
    """adaptive: rows over which the coefficient may change by about its own size."""
    target_kl: PositiveFloat = 0.1
    """adaptive: nats per row's token that the coefficient steers to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: groups whose scores are all equal teach nothing; they leave, others come instead."""

    enable: bool = False
    metric: Literal["score", "seq_reward", "reward", "acc"] = "score"
    """All of them mean the row's score; with gdpo it is each of its components."""
    max_num_gen_batches: NonNegativeInt = 0
    """Stop when this many batches' worth of groups in a row were filtered out; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    adv_estimator: str = "grpo"
    """A registered estimator (docs/algorithms.md) or `path/to/file.py:function`."""
    gamma: OpenFraction = 1.0
    """Discount per token."""
    lam: Fraction = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """false: Dr. GRPO."""
    gdpo_reward_keys: tuple[Name, ...] = ()
    """gdpo: the components of a score, numbers that the reward returns in its dict; at most 8."""
    gdpo_reward_weights: tuple[float, ...] | None = None
    """gdpo: of each component; None: 1."""
    use_kl_in_reward: bool = False
    """Subtract kl_coef * KL(old policy || reference) from each token's reward."""
    kl_penalty: KLEstimator = "kl"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongBufferConfig:
    """DAPO's soft overlong punishment: the score falls linearly over the last `len` tokens of the longest response
    allowed (data.max_response_length), by up to penalty_factor."""

    enable: bool = False
    len: NonNegativeInt = 0
    penalty_factor: NonNegativeFloat = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModelConfig:
    """A model behind an OpenAI-compatible interface, which somebody else serves.

    `reward.judge` is given to an async reward function that has a parameter `judge`: `await judge.chat(messages,
    max_tokens=8)`, and more of agent_loop.llm.openai_remote.OpenAIRemote. `distillation.teacher_model.remote`, with
    name=openai, must tell log-probs of a prompt's tokens (prompt_logprobs or echo), at temperature 1.
    """

    base_url: str | None = None
    """With the version: https://host/v1."""
    model: str | None = None
    """Its name there."""
    key_env: str | None = None
    """The environment variable with the key, where the run is started."""
    key_file: str | None = None
    """The same from a file that only its owner can read."""
    concurrency: PositiveInt = 16
    """Calls that one agent worker has open."""
    timeout: PositiveFloat = 120.0
    """Seconds of one call, with all its tries and waits."""

    @property
    def given(self) -> bool:
        return self != RemoteModelConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomRewardConfig:
    path: str | None = None
    """A Python file; None: `name` is a registered reward."""
    name: str = "compute_score"
    """compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs) -> float or {"score": ...}"""
    reward_kwargs: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    timeout: PositiveFloat = 10.0
    """Seconds of one call, also of a judge's answers in it."""
    judge: RemoteModelConfig = field(default_factory=RemoteModelConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)

    @property
    def function(self) -> str:
        """What agent workers load; empty where a reward model scores and no function is named."""
        custom = self.custom_reward_function
        if custom.path:
            return f"{custom.path}:{custom.name}"
        return "" if self.reward_model.enable and custom.name == CustomRewardConfig().name else custom.name


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    path: str | None = None
    """A directory with a model of the policy's tokenizer. name=openai needs none, and takes one for its tokenizer.json:
    that it is the policy's is checked there, and trusted otherwise."""
    placement: Literal["ranks", "servers"] = "ranks"
    """ranks: a stage of the update on the training ranks, which hold the teacher too. servers: LLM servers of its own
    score each row before it is put, beside generation; a model that the server knows, and it takes no new weights."""
    num_replicas: PositiveInt = 1
    """servers: how many."""
    name: Literal["torch", "sim", "openai"] = "torch"
    """servers: their kind; sim gives numbers without a model; openai: a model that somebody else serves (`remote`)."""
    remote: RemoteModelConfig = field(default_factory=RemoteModelConfig)
    max_token_len_per_gpu: PositiveInt | None = None
    """Tokens per micro-batch, or per pass of a server; None: the actor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationLossConfig:
    loss_mode: KLEstimator = "k3"
    """Of KL(policy || teacher) per sampled token (docs/algorithms.md)."""
    distillation_loss_coef: NonNegativeFloat = 1.0
    use_task_rewards: bool = True
    """Beside the policy loss; false: the policy only follows its teacher, whatever its answers score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationConfig:
    """On-policy distillation: the policy samples, a frozen teacher says how likely each of its tokens was to it.
    Agarwal et al., https://arxiv.org/abs/2306.13649."""

    enabled: bool = False
    teacher_model: TeacherConfig = field(default_factory=TeacherConfig)
    distillation_loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)

    @property
    def on_ranks(self) -> bool:
        """Whether the training ranks hold the teacher."""
        return self.enabled and self.teacher_model.placement == "ranks"

    @property
    def on_servers(self) -> bool:
        return self.enabled and self.teacher_model.placement == "servers"
