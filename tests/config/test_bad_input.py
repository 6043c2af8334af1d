"""Each mistake names the key, the value, and what to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from streamrl.config import ConfigError, check_ports, load_config

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
PI_OLD = f"{CORRECTION}.pi_old"
CURRENT = (f"{PI_OLD}=current", f"{ACTOR}.ppo_mini_batch_size=8")
GDPO = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]")


def problem(arguments: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    assert len(caught.value.problems) == 1, caught.value.problems
    return caught.value.problems[0]


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("data.train_batch_sise=8", "data.train_batch_size"),
        ("rollout.n=8", "actor_rollout_ref.rollout.n"),
        ("trainer.devices=cpu", "trainer.device"),
        ("trainer.trainer_mode=sync", "trainer.v1.trainer_mode"),
        ("actor_rollout_ref.actor.lr=1e-3", "actor_rollout_ref.actor.optim.lr"),
        ("num_data_storage_units=3", "transfer_queue.backend.SimpleStorage.num_data_storage_units"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(valid: list[str], argument: str, nearest: str):
    assert problem([*valid, argument]) == f"unknown key {argument.split('=')[0]}; did you mean {nearest}?"


def test_a_key_like_no_other_points_to_the_list_of_keys(valid: list[str]):
    assert "--dry-run" in problem([*valid, "zzz=1"])


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("data.train_batch_size=many", "data.train_batch_size=many is not allowed; it takes an integer >= 1"),
        ("data.train_batch_size=0", "it takes an integer >= 1"),
        ("data.train_batch_size=8.5", "it takes an integer >= 1"),
        ("data.train_batch_size=true", "it takes an integer >= 1"),
        ("data.shuffle=3", "data.shuffle=3 is not allowed; it takes true or false"),
        ("trainer.device=tpu", "it takes one of cpu, cuda"),
        ("algorithm.kl_penalty=k4", "it takes one of k1, kl, abs"),
        (f"{ACTOR}.optim.lr=nan", "it takes a number > 0 and <= 10"),
        (f"{ACTOR}.optim.lr=-1e-3", "it takes a number > 0 and <= 10"),
        (f"{ACTOR}.optim.lr=1e300", "it takes a number > 0 and <= 10"),
        (f"{ROLLOUT}.temperature=1e-300", "it takes a number >= 0.01"),
        (f"{ROLLOUT}.max_num_seqs=65537", "an integer >= 1 and <= 65536"),
        ("trainer.seed=9223372036854775808", "an integer >= 0 and <= 9223372036854775807"),
        ("data.seed=9223372036854775808", "an integer >= 0 and <= 9223372036854775807"),
        (f"{ROLLOUT}.seed=9223372036854775808", "an integer >= 0 and <= 9223372036854775807"),
        (f"{ACTOR}.optim.betas=[0.9]", "a list of 2, each a number >= 0 and < 1"),
        (f"{ACTOR}.optim.betas=[1,1]", "a list of 2, each a number >= 0 and < 1"),
        (f"{ROLLOUT}.max_model_len=long", "an integer >= 1 or null"),
        ("monitor.prometheus.port=70000", ">= 0 and <= 65535"),
        ("trainer.experiment_name='../up'", "matching"),
        ("trainer.logger=[console,wandbb]", "did you mean 'wandb'"),
        ("trainer.v1.sampler.max_off_policy_strategy=hope", "one of drop, wait, mask or null"),
        (f"{ROLLOUT}.tools=3", "a mapping from names to mappings"),
        (f"{ROLLOUT}.tools=[3]", "a list of names (or {tool: name, setting: value})"),
        (f"{ROLLOUT}.tools=[calculator,calculator]", "a list of names (or {tool: name, setting: value})"),
        (f"{ROLLOUT}.tools=[{{latency_mean:0.3}}]", "a list of names (or {tool: name, setting: value})"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_allowed(valid: list[str], argument: str, says: str):
    message = problem([*valid, argument])
    assert argument.split("=")[0] in message
    assert says in message


def test_a_value_for_a_section_lists_its_keys(valid: list[str]):
    message = problem([*valid, "trainer.v1=sync"])
    assert "trainer.v1 is a section; its keys are colocate_async, sampler, separate_async, trainer_mode" in message


def test_all_mistakes_are_found_at_once(valid: list[str]):
    with pytest.raises(ConfigError) as caught:
        load_config([*valid, "trainer.nonsense=1", "data.shuffle=3", "trainer.use_v1=false"])
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["data.train_batch_size=2"], "cannot be larger than the batch"),
        (["data.train_batch_size=6"], "must be a multiple of the mini-batch"),
        (["trainer.v1.trainer_mode=separate_async"], "set trainer.v1.separate_async.parameter_sync_step=2"),
        ([f"{ROLLOUT}.n=1"], "needs n >= 2"),
        ([f"{ACTOR}.clip_ratio_c=1.0"], "above 1"),
        ([f"{ACTOR}.clip_ratio_low=1.5"], "must be below 1"),
        ([f"{ROLLOUT}.max_model_len=100"], "shorter than data.max_prompt_length + data.max_response_length = 1024"),
        ([f"{ROLLOUT}.val_kwargs.temperature=0.001"], "it takes 0, or a number >= 0.01"),
        ([f"{ROLLOUT}.val_kwargs={{do_sample: true, temperature: 0}}"], "samples nothing"),
        ([f"{ROLLOUT}.val_kwargs={{do_sample: false, temperature: 0.6}}"], "set do_sample=true to sample at it"),
        (["runtime=local", "trainer.n_gpus_per_node=2"], "set trainer.n_gpus_per_node=1"),
        ([f"{ACTOR}.strategy=sim"], "set runtime=local"),
        (["runtime=local", f"{ROLLOUT}.name=sim", f"{ROLLOUT}.sim.clock=virtual"], f"{ACTOR}.strategy=sim"),
        (["algorithm.rollout_correction.loss_type=reinforce"], "needs algorithm.rollout_correction.bypass_mode=true"),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], "needs rollout_rs_threshold"),
        (["algorithm.rollout_correction.rollout_is_threshold=many"], "expected a number above 0, or 'low_high'"),
        (["algorithm.rollout_correction.bypass_mode=true", f"{ROLLOUT}.top_p=0.9"], "of the cut distribution"),
        (["algorithm.filter_groups.enable=true", f"{ROLLOUT}.n=1", "algorithm.adv_estimator=gae"], "needs n >= 2"),
        (["distillation.enabled=true"], "needs the directory of a model"),
        (["algorithm.adv_estimator=gdpo"], "needs algorithm.gdpo_reward_keys"),
        ([f"{PI_OLD}=bypass", f"{CORRECTION}.bypass_mode=false"], f"contradicts {PI_OLD}=bypass"),
        ([f"{PI_OLD}=current"], "one optimizer step per set of weights"),
        ([*CURRENT, f"{ACTOR}.ppo_epochs=2"], "ppo_epochs=2 must be 1"),
        ([*CURRENT, f"{CORRECTION}.rollout_is=token"], "no log-probs before the step, which rollout_is"),
        ([*CURRENT, "algorithm.use_kl_in_reward=true"], "no log-probs for algorithm.use_kl_in_reward"),
        ([*CURRENT, f"{ACTOR}.policy_loss.loss_mode=kl_cov"], "no log-probs for loss_mode=kl_cov to select by"),
        (["algorithm.gdpo_reward_keys=[a]"], "have no effect with algorithm.adv_estimator=grpo"),
        ([*GDPO, "algorithm.gdpo_reward_keys=[a,b,c,d,e,f,g,h,i]"], "has 9 names; at most 8 components"),
        ([*GDPO, "algorithm.gdpo_reward_keys=[a,a]"], "names a component twice"),
        ([*GDPO, "algorithm.gdpo_reward_weights=[1.0]"], "one finite number per component (2)"),
        ([*GDPO, "algorithm.use_kl_in_reward=true"], "a penalty on their sum would be lost"),
        (["algorithm.adv_estimator=grop"], "did you mean 'grpo'"),
        (["algorithm.adv_estimator=gae", "critic.enable=false"], "needs a critic's values"),
        (["reward.overlong_buffer={enable: true, len: 1000}"], "at most data.max_response_length=512"),
        (["critic.use_dynamic_bsz=false"], "needs critic.ppo_micro_batch_size_per_gpu"),
        ([f"{ACTOR}.ulysses_sequence_parallel_size=2"], "must divide the 1 training ranks"),
        (["trainer.n_gpus_per_node=64"], "fewer rows than the 64 training ranks"),
        (["trainer.resume_mode=resume_path"], "go together"),
        (["trainer.resume_from_path=runs/x"], "go together"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere"], "there is no directory /nowhere"),
        (["transfer_queue.unit_budget_bytes=1"], "one segment of transfer_queue.segment_bytes=8388608"),
        (["transfer_queue.storage_dir=/nowhere"], "/nowhere is no writable directory"),
        (["trainer.runs_dir=/dev/null/runs"], "/dev/null is no writable directory"),
        (["trainer.rollout_data_dir=/dev/null"], "trainer.rollout_data_dir: cannot make /dev/null"),
        (["trainer.validation_data_dir=/dev/null/said"], "trainer.validation_data_dir: cannot make /dev/null/said"),
    ],
)
def test_keys_that_do_not_fit_together(valid: list[str], arguments: list[str], says: str):
    assert says in problem([*valid, *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["data.train_files=[]"], "data.train_files is not set"),
        (["data.val_files=[]"], "trainer.val_before_train=false"),
        (["data.train_files=/nowhere/train.jsonl"], "data.train_files: there is no file /nowhere/train.jsonl"),
        (["data.train_files=nowhere.jsonl"], "there is no file nowhere.jsonl (looked in "),
        (["data.train_files=@tmp/train.csv"], "ends in .csv; readable are .jsonl, .json, .parquet"),
        (["actor_rollout_ref.model.path=''"], "actor_rollout_ref.model.path is not set"),
        (
            ["actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"],
            "without --dry-run `streamrl train` downloads it",
        ),
        (["actor_rollout_ref.model.path=@tmp"], "has no config.json"),
        (["actor_rollout_ref.model.tokenizer_path=@tmp"], "there is no tokenizer in"),
        (["reward.custom_reward_function.path=/nowhere/reward.py"], "there is no file /nowhere/reward.py"),
        (["reward.custom_reward_function.name=score"], "defines no score"),
        (["reward.custom_reward_function.path=@tmp/broken.py"], "is no valid Python"),
        (["reward.custom_reward_function.path=null"], "no reward is registered as 'compute_score'"),
        ([f"{ROLLOUT}.agent.default_agent_loop=tool_agnt"], "did you mean 'tool_agent'?"),
        ([f"{ROLLOUT}.agent.default_agent_loop=@tmp/reward.py:Loop"], "defines no Loop"),
        ([f"{ROLLOUT}.agent.default_agent_loop=nowhere.py:Loop"], "there is no file nowhere.py"),
        ([f"{ACTOR}.policy_loss.loss_mode=vanila"], "unknown policy loss 'vanila'; known: cispo, clip_cov, "),
        ([f"{ACTOR}.policy_loss.loss_mode=@tmp/reward.py:loss"], "defines no loss"),
        ([f"{ROLLOUT}.tools=[@tmp/reward.py:Search]"], "defines no Search"),
        ([f"{ROLLOUT}.tools=nowhere.py:Search"], "there is no file nowhere.py"),
        ([f"{ROLLOUT}.tools.calculatr.latency_mean=1"], "did you mean 'calculator'?"),
        ([f"{ROLLOUT}.tools.calculator.latensy=1"], "does not take the settings"),
        ([f"{ROLLOUT}.tools.calculator.latency_mean=-1"], "not negative"),
    ],
)
def test_what_a_path_or_name_stands_for_must_exist(valid: list[str], tmp_path: Path, arguments: list[str], says: str):
    (tmp_path / "train.csv").write_text("")
    (tmp_path / "broken.py").write_text("def compute_score(:\n")
    assert says in problem([*valid, *(argument.replace("@tmp", str(tmp_path)) for argument in arguments)])


def test_code_of_the_user_is_looked_into_and_not_run(valid: list[str], tmp_path: Path):
    loop = "class Loop:\n    async def run(self, row, ctx): ...\n"
    (tmp_path / "mine.py").write_text(f"raise SystemExit('imported')\n{loop}")
    load_config([*valid, f"{ROLLOUT}.agent.default_agent_loop={tmp_path}/mine.py:Loop"])


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("data.train_batch_size", "expected key=value"),
        ("data.seed=1,2", "not a sweep"),
        ("experiment=calculater", "there is no experiment named 'calculater'; there is: calculator"),
        ("~trainer.seed", "cannot be read"),
        ("trainer.seed=${nowhere}", "cannot be resolved"),
    ],
)
def test_arguments_that_cannot_be_read(valid: list[str], argument: str, says: str):
    assert says in problem([*valid, argument])


@pytest.mark.parametrize(
    "argument",
    [
        "_target_=os.system",
        "trainer._target_=os.system",
        "actor_rollout_ref.rollout.tools.calculator._target_=os.system",
        "actor_rollout_ref.rollout.tools={calculator:{_target_:os.system}}",
        "actor_rollout_ref.rollout.tools=[{tool:calculator,_target_:os.system}]",
        "critic._target_=os.system",
    ],
)
def test_a_target_is_refused_wherever_it_stands(valid: list[str], argument: str):
    assert "_target_ is refused" in problem([*valid, argument])


@pytest.mark.parametrize(
    "text", ["${now:%Y}", "${oc.decode:1}", "${hydra:runtime.cwd}", "${oc.env:${trainer.device}}", "a ${x.${y}:1} b"]
)
def test_only_harmless_resolvers_may_be_named(valid: list[str], text: str):
    assert "not allowed" in problem([*valid, f"trainer.project_name='{text}'"])


def test_a_yaml_tag_in_an_experiment_runs_nothing(valid: list[str], tmp_path: Path):
    evil = tmp_path / "experiment" / "evil.yaml"
    evil.parent.mkdir()
    evil.write_text(f"# @package _global_\ntrainer: !!python/object/apply:os.mkdir [{tmp_path}/made]\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config([*valid, "experiment=evil"], config_dir=str(tmp_path))
    assert not (tmp_path / "made").exists()


FILES = {
    "latin": b'trainer: {seed: "\xff"}',
    "anchor": b"trainer: &a\n  x: *a",
    "itself": b"defaults: [itself]",
    "deep": b"x: " + b"[" * 3000 + b"]" * 3000,
    "broken": b"x: [",
}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("latin", "save the file as UTF-8"),
        ("anchor", "holds itself"),
        ("itself", "holds itself"),
        ("deep", "nested too deeply"),
        ("broken", "line 2"),
    ],
)
def test_an_experiment_that_cannot_be_read_is_named(valid: list[str], tmp_path: Path, name: str, says: str):
    file = tmp_path / "experiment" / f"{name}.yaml"
    file.parent.mkdir()
    file.write_bytes(b"# @package _global_\n" + FILES[name])
    with pytest.raises(ConfigError, match=f"experiment/{name}.yaml.* cannot be read: .*{says}"):
        load_config([*valid, "experiment=calculator", f"experiment={name}"], config_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("experiment=null", "experiment=null: name one of calculator"),
        ("+data.x=" + "[" * 500 + "]" * 500, "nested too deeply"),
        ("data.train_files=/", "data.train_files: / is the whole file system"),
        ("data.train_files=" + "a" * 100_000, "data.train_files: " + "a" * 100 + "... (100,000 characters)"),
        ("trainer.seed=" + "a" * 100_000, "trainer.seed=" + "a" * 100 + "... (100,000 characters) is not allowed"),
    ],
)
def test_hostile_arguments_are_mistakes_like_others(valid: list[str], argument: str, says: str):
    assert says in problem([*valid, argument])


def test_a_port_in_use_is_an_error_at_start(valid: list[str]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = load_config([*valid, f"monitor.prometheus.port={port}"]).config
        with pytest.raises(ConfigError, match=f"monitor.prometheus.port={port} cannot be used .*choose another, or 0"):
            check_ports(config)


def test_a_free_port_passes(valid: list[str]):
    check_ports(load_config(valid).config)


def test_a_context_longer_than_the_model_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=1064 .* exceeds .*=256; lower data.max_prompt_length or"):
        load_config(["experiment=calculator", "data.max_response_length=1000"])
