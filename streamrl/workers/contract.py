"""What the trainer tells the ranks with a batch, and which columns each method reads and writes.

`extra_info` of the `KVBatchMeta`:

| key | what | of |
|---|---|---|
| mini_batch_size | prompts per optimizer step (absent: one step for all) | update_actor, update_critic |
| temperature | at which the rows were sampled | all that compute log-probs |
| step | the step of the trainer, from 1 | all |
| version | the weights being trained: age of a token = version - its stamp; sets the actor's learning rate | all |
| staleness | mean age of the rows, versions | update_actor |
| max_age | older tokens leave the loss, in versions; None: any age counts | update_actor, compute_advantage |
| ages | true: tell how old the tokens are, though any age counts | update_actor, compute_advantage |
| max_masked_ratio | a row more of which is older than max_age leaves the loss | update_actor, compute_advantage |
| excluded | keys that do not count | update_actor |
| scores | {key: outcome score of the row's session} | compute_rewards, compute_advantage |
| kl_coef | weight of the KL penalty in the reward | compute_rewards |
| advantages | {key: scalar}, by estimators that work on sessions | compute_advantage, update_actor |
| reward_columns | the column token_level_rewards is there, in place of scores: read it | compute_advantage |
| advantage_columns | the columns advantages, returns and loss_mask are there: read them | update_actor, update_critic |
| snapshot | old log-probs of the weights that `snapshot` kept, not of the current ones | compute_log_prob |

Every dict with the rows' keys is narrowed to a rank's share on its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WRITES: dict[str, tuple[str, ...]] = {
    "compute_rm_scores": ("rm_scores",),
    "compute_log_prob": ("old_log_probs", "entropy"),
    "compute_ref_log_prob": ("ref_log_prob",),
    "compute_teacher_log_prob": ("teacher_log_prob",),
    "compute_values": ("values",),
    "compute_rewards": ("token_level_rewards",),
    "compute_advantage": ("advantages", "returns", "loss_mask"),
    "update_actor": (),
    "update_critic": (),
}

RECORDED = ("input_ids", "response_mask", "rollout_log_probs", "weight_versions")
"""What a replay needs of a row: all that agents and servers made of it."""


def step_of(info: Mapping[str, Any]) -> int:
    """Of the trainer, from 1; where it is not told, as many as there were versions."""
    return int(info.get("step", int(info.get("version", 0)) + 1))


@dataclass(frozen=True, slots=True)
class Reads:
    """The fields that each method reads, as far as the configuration needs them."""

    old: str
    """The column that pi_old is: old_log_probs, with bypass rollout_log_probs; empty: pi_old is the current policy."""
    kl_loss: bool = False
    kl_in_reward: bool = False
    teacher: bool = False
    values: bool = False
    """Whether the advantage estimator needs a critic's values."""
    record: bool = False
    """Whether `update_actor` keeps what it trained, for a replay."""

    def of(self, method: str, info: Mapping[str, Any]) -> list[str]:
        """In a fixed order. How long the response is, a rank knows from the tag `response_len`."""
        aged = ["weight_versions"] if info.get("max_age") is not None or info.get("ages") else []
        match method:
            case "compute_log_prob" | "compute_ref_log_prob" | "compute_teacher_log_prob" | "compute_values":
                return ["input_ids"]
            case "compute_rm_scores":
                return ["input_ids", "response_mask"]
            case "compute_rewards":
                return ["response_mask", "ref_log_prob", self.old]
            case "compute_advantage":
                rewards = ["token_level_rewards"] if self.kl_in_reward or info.get("reward_columns") else []
                return ["response_mask", *rewards, *(["values"] if self.values else []), *aged]
            case "update_critic":
                return ["input_ids", "loss_mask", "values", "returns"]
            case "update_actor":
                columns = ["advantages", "loss_mask"] if info.get("advantage_columns") else ["response_mask", *aged]
                others = {"ref_log_prob": self.kl_loss, "teacher_log_prob": self.teacher}
                old = [self.old] if self.old else []
                more = ["rollout_log_probs", *old, *(name for name, needed in others.items() if needed)]
                kept = RECORDED if self.record else ()
                return list(dict.fromkeys(["input_ids", *columns, *more, *kept]))
        raise KeyError(f"no method {method!r}; there are: {', '.join(WRITES)}")
