"""verl's keys that are no keys of ours. A script written for verl starts here, or says exactly what it asks too much.

RENAMED       it has another place here
UNAVAILABLE   it would change what is computed, and only some values ask for nothing beyond what exists
INERT         it changes speed, layout or logging alone; named in a note
MIRRORED      it repeats another key and must agree with it

When a feature arrives, its keys move into the dataclasses.
"""

from __future__ import annotations

from typing import Any

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

RENAMED: dict[str, str] = {
    "custom_reward_function": "reward.custom_reward_function",
    "data.input_key": "data.prompt_key",  # slime
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.overlong_buffer": "reward.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
    "reward.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.enable_resource_pool": "reward.reward_model.enable_resource_pool",
    "reward_model.model.path": "reward.reward_model.model_path",
    "critic.model.fsdp_config": "critic.fsdp_config",
}
"""Old place (or another framework's name) -> its place now."""

UNAVAILABLE: dict[str, tuple[Any, ...]] = {
    "distillation.distillation_loss.use_policy_gradient": (False,),
    "data.validation_shuffle": (False,),
    "data.trust_remote_code": (False,),
    "data.tool_config_path": (None,),
    f"{_MODEL}.trust_remote_code": (False,),
    f"{_MODEL}.lora_adapter_path": (None,),
    f"{_MODEL}.override_config": ({}, None),
    f"{_MODEL}.custom_chat_template": (None,),
    f"{_MODEL}.external_lib": (None,),
    f"{_MODEL}.mtp.enable": (False,),
    f"{_MODEL}.mtp.enable_train": (False,),
    f"{_MODEL}.exclude_modules": (None,),
    f"{_ACTOR}.shuffle": (False,),
    f"{_ACTOR}.checkpoint.load_contents": (["model", "optimizer", "extra"], None),
    f"{_ACTOR}.freeze_vision_tower": (False,),
    f"{_ACTOR}.use_rollout_log_probs": (False,),
    f"{_ROLLOUT}.mode": ("async",),
    f"{_ROLLOUT}.calculate_log_probs": (True,),
    f"{_ROLLOUT}.full_determinism": (False,),
    f"{_ROLLOUT}.ignore_eos": (False,),
    f"{_ROLLOUT}.quantization": (None,),
    f"{_ROLLOUT}.enable_rollout_routing_replay": (False,),
    f"{_ROLLOUT}.do_sample": (True,),
    f"{_ROLLOUT}.over_sample_rate": (0,),
    f"{_ROLLOUT}.repetition_penalty": (1.0,),
    f"{_ROLLOUT}.logprobs_mode": ("processed_logprobs",),
    f"{_ROLLOUT}.skip_rollout": (False,),
    f"{_ROLLOUT}.skip.enable": (False,),
    f"{_ROLLOUT}.multi_turn.max_user_turns": (None,),
    f"{_ROLLOUT}.multi_turn.interaction_config_path": (None,),
    f"{_ROLLOUT}.multi_turn.use_inference_chat_template": (False,),
    f"{_ROLLOUT}.multi_turn.num_repeat_rollouts": (None,),
    f"{_ROLLOUT}.multi_turn.tool_config_path": (None,),
    f"{_ROLLOUT}.multi_turn.function_tool_path": (None,),
    f"{_ROLLOUT}.agent.agent_loop_config_path": (None,),
    f"{_ROLLOUT}.agent.agent_loop_manager_class": (None,),
    "critic.shuffle": (False,),
    "critic.checkpoint.load_contents": (["model", "optimizer", "extra"], None),
    "critic.model.override_config": ({}, None),
    "critic.model.external_lib": (None,),
    "critic.model.trust_remote_code": (False,),
    "critic.model.lora_rank": (0,),
    "algorithm.use_pf_ppo": (False,),
    "data.sampler.class_path": (None,),
    "data.datagen.path": (None,),
    "reward.reward_manager.source": ("register",),
    "reward.reward_manager.name": ("naive", "dapo", "gdpo"),
    "reward.reward_model.enable_resource_pool": (False,),
    "reward.sandbox_fusion.url": (None,),
    "trainer.use_v1": (True,),
    "trainer.checkpoint_callback_class": (None,),
    "trainer.v1.separate_async.hybrid_rollout.enable_switch": (False,),
    "trainer.v1.sampler.sync_refill_failed_groups": (False,),
    "transfer_queue.enable": (True,),
    "async_training.staleness_threshold": (),
    "async_training.trigger_parameter_sync_step": (),
    "async_training.require_batches": (),
    "async_training.partial_rollout": (True,),
    "skip.rollout.enable": (False,),
    "skip.rollout_tq.enable": (False,),
    "skip.async_rollout.enable": (False,),
}
"""Key -> the values that ask for nothing beyond what exists (usually verl's default). Any other one is an error."""

for _fsdp in (f"{_ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp_config"):
    UNAVAILABLE |= {f"{_fsdp}.mixed_precision": (None,), f"{_fsdp}.full_determinism": (False,)}
for _optim in (f"{_ACTOR}.optim", "critic.optim"):
    UNAVAILABLE |= {
        f"{_optim}.optimizer": ("AdamW",),
        f"{_optim}.optimizer_impl": ("torch.optim",),
        f"{_optim}.num_cycles": (0.5,),
        f"{_optim}.override_optimizer_config": (None, {}),
    }

REFUSED: tuple[str, ...] = (
    f"{_MODEL}.override_config.*",
    "critic.model.override_config.*",
    "*.fsdp_config.mixed_precision.*",
    "*.optim.override_optimizer_config.*",
)
"""Patterns of keys under such ones: anything but nothing is an error."""

MEANT: dict[str, dict[str, str]] = {
    "reward.reward_manager.name": {
        "dapo": "reward.overlong_buffer takes its place; without it the score is the reward function's",
        "gdpo": "algorithm.gdpo_reward_keys take its place",
    },
}
"""Key -> an accepted value that means something -> by what it is done here; the note says so."""

MIRRORED: dict[str, str] = {
    "reward.reward_kwargs.max_resp_len": "data.max_response_length",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{_ROLLOUT}.response_length": "data.max_response_length",
    "critic.rollout_n": f"{_ROLLOUT}.n",
}
"""Key -> the key of ours that has to have the same value."""

_FSDP = (
    "wrap_policy*", "fsdp_size", "forward_prefetch", "use_orig_params", "offload_policy", "seed", "use_torch_compile",
    "entropy_*", "strategy", "forward_only", "ulysses_*",
)  # fmt: skip
"""Under each fsdp_config."""

INERT: tuple[str, ...] = (
    *(f"{place}.fsdp_config.{key}" for place in (_ACTOR, "actor_rollout_ref.ref", "critic") for key in _FSDP),
    "hydra.*",
    "model_engine",
    "data.gen_batch_size",  # prompts are issued one by one, as the queue gives credit
    "data.return_raw_chat",
    "data.val_batch_size",  # the whole set at once
    "data.return_multi_modal_inputs",
    "data.dataloader_num_workers",
    "data.filter_overlong_prompts_workers",
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.nccl_timeout",
    "actor_rollout_ref.ref.strategy",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    "actor_rollout_ref.ref.use_torch_compile",
    "actor_rollout_ref.ref.entropy_*",
    f"{_MODEL}.override_config.attn_implementation",
    f"{_MODEL}.enable_activation_offload",
    f"{_MODEL}.fused_kernel_options*",
    f"{_MODEL}.tiled_mlp.*",
    f"{_MODEL}.use_liger",
    f"{_MODEL}.use_fused_kernels",
    f"{_MODEL}.use_shm",
    f"{_MODEL}.mtp.*",
    f"{_ACTOR}.ppo_micro_batch_size",
    f"{_ACTOR}.data_loader_seed",
    f"{_ACTOR}.calculate_entropy",
    f"{_ACTOR}.use_torch_compile",
    f"{_ACTOR}.entropy_from_logits_with_chunking",
    f"{_ACTOR}.entropy_checkpointing",
    "*.profiler.*",
    f"{_ACTOR}.checkpoint.mbridge_config*",
    f"{_ROLLOUT}.nnodes",
    f"{_ROLLOUT}.n_gpus_per_node",
    f"{_ROLLOUT}.prompt_length",
    f"{_ROLLOUT}.response_length",
    f"{_ROLLOUT}.expert_parallel_size",
    f"{_ROLLOUT}.pipeline_model_parallel_size",
    f"{_ROLLOUT}.cudagraph_capture_sizes",
    f"{_ROLLOUT}.scheduling_policy",
    f"{_ROLLOUT}.multi_stage_wake_up",
    f"{_ROLLOUT}.layered_summon",
    f"{_ROLLOUT}.skip.*",
    f"{_ROLLOUT}.max_num_batched_tokens",
    f"{_ROLLOUT}.free_cache_engine",
    f"{_ROLLOUT}.enable_chunked_prefill",
    f"{_ROLLOUT}.enable_prefix_caching",
    f"{_ROLLOUT}.load_format",
    f"{_ROLLOUT}.dtype",
    f"{_ROLLOUT}.disable_log_stats",
    f"{_ROLLOUT}.log_prob_*",
    f"{_ROLLOUT}.engine_kwargs.[!v]*",  # of sglang and trtllm
    f"{_ROLLOUT}.multi_turn.enable",
    f"{_ROLLOUT}.multi_turn.tokenization_sanity_check_mode",
    f"{_ROLLOUT}.checkpoint_engine.*",
    f"{_ROLLOUT}.router_config_path",
    f"{_ROLLOUT}.trace.*",
    f"{_ROLLOUT}.prometheus.*",
    f"{_ROLLOUT}.disaggregation.*",
    "critic.rollout_n",
    "critic.data_loader_seed",
    "critic.nccl_timeout",
    "critic.ppo_micro_batch_size",
    "critic.ppo_infer_*",
    "critic.forward_*",
    "critic.use_dynamic_bsz_infer",
    "critic.checkpoint.*",
    "critic.model.tokenizer_path",
    "critic.model.use_shm",
    "critic.model.enable_activation_offload",
    "reward.num_workers",
    "reward.overlong_buffer.log",
    "reward.reward_kwargs.max_resp_len",
    "reward.reward_manager.module.*",
    "reward.reward_model.n_gpus_per_node",
    "reward.reward_model.nnodes",
    "reward.reward_model.rollout.*",
    "reward.sandbox_fusion.*",
    "reward_model.*",
    "algorithm.pf_ppo.*",
    "data.use_shm",
    "data.return_raw_input_ids",
    "data.return_full_prompt",
    "trainer.use_legacy_worker_impl",
    "trainer.balance_batch",
    "trainer.default_local_dir",
    "trainer.default_hdfs_dir",
    "trainer.del_local_ckpt_after_load",
    "trainer.max_critic_ckpt_to_keep",  # a checkpoint holds both
    "trainer.esi_redundant_time",
    "trainer.ray_wait_register_center_timeout",
    "trainer.v1.separate_async.hybrid_rollout.*",
    "transfer_queue.backend.SimpleStorage.total_storage_size",
    "transfer_queue.backend.MooncakeStore.*",
    "transfer_queue.operations.metrics.*",
    "distillation.teacher_key",
    "distillation.distillation_loss.topk",
    "distillation.nnodes",
    "distillation.n_gpus_per_node",
    "global_profiler.profile_continuous_steps",
    "global_profiler.global_tool_config.*",
    "global_profiler.tool_config.*",
    "skip.*",
    "async_training.*",
    "ray_kwargs.ray_init.runtime_env*",
)
"""Patterns of keys that change speed or nothing here. They are accepted and named in one note."""

SERVER = f"{_ROLLOUT}.name"
OF_VLLM: dict[str, Any] = {
    f"{_ROLLOUT}.tensor_model_parallel_size": 1,
    f"{_ROLLOUT}.data_parallel_size": 1,
    f"{_ROLLOUT}.gpu_memory_utilization": None,
    f"{_ROLLOUT}.enforce_eager": None,
    f"{_ROLLOUT}.engine_kwargs.vllm": {},
}
"""Keys of ours, with their defaults, that do nothing unless the servers are vLLM's; then they are named in the note."""

OF_SGLANG = (f"{_ROLLOUT}.tensor_model_parallel_size", f"{_ROLLOUT}.data_parallel_size")
"""Those that SGLang takes, too."""
SGLANG_AT = (f"{_ROLLOUT}.sglang.python", f"{_ROLLOUT}.sglang.url")
"""rollout.name=sglang stays what it is where one of these says how SGLang is reached; verl's own lines do not."""

SUBSTITUTED: dict[str, dict[str, str]] = {
    f"{_ROLLOUT}.name": {"sglang": "torch", "trtllm": "torch", "hf": "torch"},
}
"""Key -> a value that does not exist here -> the one that takes its place in a command line of verl's; the note says
so. In others it is an error."""

OTHER_SERVERS = ("trtllm", "hf")
"""Of verl's kinds of server those that do not exist here at all."""

INERT_ITEMS: dict[str, tuple[str, ...]] = {
    "trainer.logger": ("vemlp_wandb", "clearml", "rl_insight"),
    f"{_ROLLOUT}.engine_kwargs.vllm": ("disable_mm_preprocessor_cache",),  # of images; vLLM has it no more
}
"""Key -> items of its list or mapping that do nothing here; they are taken out and named in the note."""

VERL_DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    f"{_ROLLOUT}.n": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.device": "cuda",
    f"{_ROLLOUT}.val_kwargs.temperature": 0,
}
"""Where verl's default is another than ours and changes what is computed or where: `streamrl config from-verl` writes
it out when a script relies on it, `python -m streamrl.main` says so."""

VERL_DEFAULTS_ASYNC: dict[str, Any] = {"algorithm.rollout_correction.bypass_mode": False}
"""The same, with another trainer_mode than sync."""

VERL_ENTRY = ("--config-path=config", "--config-name=ppo_trainer", "--config-name=ppo_trainer.yaml")
"""Arguments of verl's scripts that only name its own defaults."""
