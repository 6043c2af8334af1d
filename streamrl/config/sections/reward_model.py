"""`reward.reward_model.*`: a model that scores answers, on the training ranks."""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.config.sections.types import PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig:
    """A frozen sequence classifier with one label, whose score of a session's last row is the session's
    (docs/extending.md). The training ranks hold it, as they hold a reference: a stage of the update, after generation
    sleeps where it does. Its parameters lie where the reference's do (actor_rollout_ref.ref.fsdp_config)."""

    enable: bool = False
    model_path: str | None = None
    """A directory with a model of the policy's tokenizer: AutoModelForSequenceClassification, num_labels 1."""
    max_token_len_per_gpu: PositiveInt | None = None
    """Tokens per micro-batch; None: the actor's."""
