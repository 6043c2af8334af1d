"""A script written for verl starts here, or says what it asks too much."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import ConfigError, load_config


def test_a_typical_verl_script_is_accepted_and_its_inert_keys_are_named_once(valid: list[str]):
    script = [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        "data.max_prompt_length=512",
        "data.filter_overlong_prompts=False",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.actor.fsdp_config.param_offload=False",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        "trainer.critic_warmup=0",
        "trainer.balance_batch=True",
        "trainer.logger=[console]",
        "trainer.total_epochs=15",
    ]
    loaded = load_config([*valid, *script])
    assert loaded.config.trainer.total_epochs == 15
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size" in loaded.inert
    assert "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space" in loaded.inert
    assert "algorithm.use_kl_in_reward" not in loaded.inert
    assert len(loaded.inert) == len(set(loaded.inert)) == 4


@pytest.mark.parametrize(
    ("argument", "usual"),
    [
        ("actor_rollout_ref.model.trust_remote_code=True", "false"),
        ("reward.reward_model.enable=True", "false"),
        ("trainer.use_v1=False", "true"),
    ],
)
def test_asking_for_what_does_not_exist_yet_is_an_error(valid: list[str], argument: str, usual: str):
    with pytest.raises(ConfigError, match=f"is not available yet; leave it out or set {usual}"):
        load_config([*valid, argument])


def test_a_gdpo_command_line_of_verl_is_accepted_as_it_is(valid: list[str]):
    script = [
        "algorithm.adv_estimator=gdpo", "reward.reward_manager.name=gdpo",
        '+algorithm.gdpo_reward_keys=["correct", "format"]', "+algorithm.gdpo_reward_weights=[1.0, 0.25]",
    ]  # fmt: skip
    algorithm = load_config([*valid, *script]).config.algorithm
    assert algorithm.gdpo_reward_keys == ("correct", "format")
    assert algorithm.gdpo_reward_weights == (1.0, 0.25)


def test_the_old_place_of_the_reward_function_still_works(valid: list[str], tmp_path: Path):
    arguments = [argument for argument in valid if not argument.startswith("reward.")]
    config = load_config([*arguments, f"custom_reward_function.path={tmp_path}/reward.py"]).config
    assert config.reward.custom_reward_function.path == str(tmp_path / "reward.py")
