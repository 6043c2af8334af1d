"""A script written for verl starts here, or says what it asks too much."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import ConfigError, load_config
from streamrl.config.advice import SUGGESTED, as_spelt_here
from streamrl.config.from_verl import translate
from streamrl.config.schema import known_keys


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
    assert "actor_rollout_ref.rollout.engine_kwargs.vllm" in loaded.inert
    assert "algorithm.use_kl_in_reward" not in loaded.inert
    assert len(loaded.inert) == len(set(loaded.inert)) == 4


@pytest.mark.parametrize(
    ("argument", "usual"),
    [
        ("actor_rollout_ref.model.trust_remote_code=True", "false"),
        ("actor_rollout_ref.model.mtp.enable_train=True", "false"),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision=bf16", "null"),
        ("actor_rollout_ref.actor.checkpoint.load_contents=[model]", "['model', 'optimizer', 'extra']"),
        ("critic.shuffle=True", "false"),
        ("skip.rollout.enable=True", "false"),
        ("reward.reward_model.enable_resource_pool=True", "false"),
        ("trainer.use_v1=False", "true"),
    ],
)
def test_asking_for_what_does_not_exist_yet_is_an_error(valid: list[str], argument: str, usual: str):
    with pytest.raises(ConfigError) as error:
        load_config([*valid, argument])
    assert f"is not available yet; leave it out or set {usual}" in str(error.value)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("+actor_rollout_ref.model.override_config.attention_dropout=0.1", "put it into the config.json"),
        ("actor_rollout_ref.rollout.multi_turn.max_user_turns=3", "max_assistant_turns bounds a trajectory"),
        ("multi_turn.max_user_turns=3", "verl's actor_rollout_ref.rollout.multi_turn.max_user_turns is not available"),
        ("async_training.staleness_threshold=0.5", "trainer.v1.sampler.max_off_policy_threshold"),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16", "fsdp_config.dtype"),
        ("actor_rollout_ref.actor.optim.clip_grad=1.0", "did you mean actor_rollout_ref.actor.grad_clip?"),
        ("critic.optim.warmup_style=cosine", "did you mean critic.optim.lr_scheduler_type?"),
        ("data.max_samples=10", "did you mean data.train_max_samples?"),
    ],
)
def test_a_refused_key_says_what_to_do_instead(valid: list[str], argument: str, says: str):
    with pytest.raises(ConfigError) as error:
        load_config([*valid, argument])
    assert says in str(error.value)


def test_every_suggestion_names_a_key():
    for theirs in SUGGESTED:
        spelt = [as_spelt_here(f"{place}{theirs}") for place in ("", "actor_rollout_ref.", "actor_rollout_ref.actor.")]
        assert any(key in known_keys() for key in spelt), theirs


@pytest.mark.parametrize(
    ("argument", "ours"),
    [
        ("reward_model.reward_kwargs.max_resp_len=100", "data.max_response_length=512"),
        ("actor_rollout_ref.rollout.prompt_length=100", "data.max_prompt_length=512"),
        ("critic.rollout_n=2", "actor_rollout_ref.rollout.n=8"),
    ],
)
def test_a_key_that_repeats_another_one_must_agree_with_it(valid: list[str], argument: str, ours: str):
    with pytest.raises(ConfigError, match=f"differs from {ours}"):
        load_config([*valid, argument])
    assert any(f"differs from {ours}" in problem for problem in translate([argument]).problems)
    key, _, value = ours.partition("=")
    load_config([*valid, f"{argument.partition('=')[0]}={value}", f"{key}={value}"])


def test_the_reward_manager_of_dapo_says_what_takes_its_place(valid: list[str]):
    (told,) = load_config([*valid, "reward_model.reward_manager=dapo"]).inert
    assert told.startswith("reward.reward_manager.name=dapo (reward.overlong_buffer takes its place")


def test_rows_per_micro_batch_are_told_to_be_ignored_only_where_they_are(valid: list[str]):
    rows = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"
    (note,) = load_config([*valid, rows]).notes
    assert note.startswith(f"{rows}: micro-batches are cut by tokens")
    assert load_config([*valid, rows, "actor_rollout_ref.actor.use_dynamic_bsz=false"]).notes == ()


def test_an_old_place_of_the_critics_layout_is_its_place_now(valid: list[str]):
    assert load_config([*valid, "critic.model.fsdp_config.param_offload=True"]).config.critic.fsdp_config.param_offload


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


@pytest.mark.parametrize(
    ("written", "meant"),
    [("num_servers", "num_replicas"), ("full_every", "weight_sync.full_every"), ("max_sessions", "agent.max_sessions")],
)
def test_a_key_of_the_rollout_with_its_section_forgotten_is_found(valid: list[str], written: str, meant: str):
    with pytest.raises(ConfigError, match=rf"did you mean actor_rollout_ref.rollout.{meant}\?"):
        load_config([*valid, f"actor_rollout_ref.rollout.{written}=2"])
