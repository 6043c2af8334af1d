"""The sections of the configuration. These dataclasses are the one place where a key, its type, its limits and its
default stand; names follow verl 0.9 where the meaning is the same.

Defaults follow verl's too, except where verl's presume a node of eight GPUs: `trainer.n_gpus_per_node` (1 here),
`trainer.device` (cpu), `rollout.n` (8: GRPO needs at least 2), `rollout.agent.num_workers` (2),
`num_data_storage_units` (2), `trainer.logger` (console only) and `algorithm.adv_estimator` (grpo).
A default of None means "derived": `streamrl.config.derive` says from what.
"""
