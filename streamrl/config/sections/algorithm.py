"""`algorithm.*` and `reward.*`: from scores to advantages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from streamrl.config.sections.types import PositiveFloat, Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionConfig:
    rollout_is: Literal["token"] | None = None
    """token: each token's loss is weighted by old policy / rollout policy, at most the threshold; None: no weight."""
    rollout_is_threshold: PositiveFloat = 2.0
    bypass_mode: bool | None = None
    """True: the old policy is the one that generated (rollout_log_probs). None: True in async modes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    adv_estimator: Literal["grpo"] = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


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
    """Seconds of one call."""
