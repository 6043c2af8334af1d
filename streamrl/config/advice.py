"""What to do instead of a key that is refused or unknown."""

from __future__ import annotations

from fnmatch import fnmatchcase

_MODEL, _ACTOR, _ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

_IN_CONFIG_JSON = "put it into the config.json of a copy of the model's directory, which is what is read here"
_TOOLS = f"name tools as {_ROLLOUT}.tools=[...] (docs/extending.md)"
_PRECISION = "fsdp_config.dtype (bfloat16 or float32) is what the model computes in"
_STALENESS = (
    "trainer.v1.trainer_mode=separate_async has trainer.v1.separate_async.{num_warmup_batches,parameter_sync_step} and "
    "trainer.v1.sampler.max_off_policy_threshold for it"
)
REMEDIES: dict[str, str] = {
    "*.override_config*": _IN_CONFIG_JSON,
    f"{_MODEL}.custom_chat_template": "put it as chat_template.jinja into the model's directory",
    "*.trust_remote_code": "only architectures of transformers itself are run",
    "*.external_lib": "nothing is imported but what reward, tools, agent loop, estimator and loss name",
    "*.mixed_precision*": _PRECISION,
    f"{_ACTOR}.use_rollout_log_probs": "algorithm.rollout_correction.bypass_mode=true is that",
    f"{_ROLLOUT}.multi_turn.max_user_turns": f"{_ROLLOUT}.multi_turn.max_assistant_turns bounds a trajectory",
    "*.tool_config_path": _TOOLS,
    "*.function_tool_path": _TOOLS,
    "*.interaction_config_path": "an agent loop of yours can hold the conversation (docs/extending.md)",
    f"{_ROLLOUT}.agent.agent_loop_config_path": f"name it as {_ROLLOUT}.agent.default_agent_loop=path/to/file.py:Class",
    "reward.reward_manager.*": "write what it does as reward.custom_reward_function.path (docs/extending.md)",
    "reward*.enable_resource_pool": (
        "the training ranks hold the reward model; a reward function may ask one that is served elsewhere "
        "(reward.custom_reward_function.path)"
    ),
    "reward.sandbox_fusion.url": "a reward function may call it (reward.custom_reward_function.path)",
    "async_training.*": _STALENESS,
}
"""Pattern of refused keys -> what to do instead."""

SUGGESTED: dict[str, str] = {
    "optim.clip_grad": "grad_clip",
    "optim.max_grad_norm": "grad_clip",
    "max_grad_norm": "grad_clip",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "optim.warmup_steps": "optim.lr_warmup_steps",
    "optim.lr_warmup_ratio": "optim.lr_warmup_steps_ratio",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "actor.lr": "actor.optim.lr",
    "actor.learning_rate": "actor.optim.lr",
    "critic.lr": "critic.optim.lr",
    "actor.kl_coef": "actor.kl_loss_coef",
    "algorithm.kl_coef": "algorithm.kl_ctrl.kl_coef",
    "data.max_samples": "data.train_max_samples",
    "data.batch_size": "data.train_batch_size",
    "data.max_length": "data.max_prompt_length",
    "rollout.max_tokens": "data.max_response_length",
    "rollout.max_new_tokens": "data.max_response_length",
    "rollout.num_generations": "rollout.n",
    "rollout.num_servers": "rollout.num_replicas",
    "rollout.num_engines": "rollout.num_replicas",
    "trainer.epochs": "trainer.total_epochs",
    "trainer.total_steps": "trainer.total_training_steps",
    "trainer.max_steps": "trainer.total_training_steps",
    "optim.total_training_steps": "trainer.total_training_steps",
    "trainer.output_dir": "trainer.runs_dir",
}
"""The end of a key as other versions and frameworks spell it -> as it ends here. Whole sections on the right stand for
themselves (data.*, trainer.*)."""


def remedy(key: str) -> str:
    """What to do instead of a key that is not available; "" where there is nothing to say."""
    return next((text for pattern, text in REMEDIES.items() if fnmatchcase(key, pattern)), "")


def as_spelt_here(key: str) -> str | None:
    """The key of ours that another version or framework spells `key`."""
    for theirs, ours in SUGGESTED.items():
        if key == theirs or key.endswith("." + theirs):
            before = key[: len(key) - len(theirs)]
            return ours if ours.split(".")[0] in ("data", "trainer", "algorithm") else before + ours
    return None
