"""What a valid configuration becomes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import yaml

from streamrl.config import StreamRLConfig, from_dict, load_config, to_dict, to_yaml
from streamrl.config.compose import TREE, compose_values
from streamrl.config.keys import flatten
from streamrl.config.schema import known_keys
from streamrl.errors import ConfigError


def test_the_entry_of_the_tree_sets_nothing_so_the_dataclasses_hold_all_defaults():
    assert compose_values([]) == {}
    assert set(yaml.safe_load((TREE / "train.yaml").read_text())) == {"defaults"}


def test_every_experiment_sets_known_keys_only():
    for experiment in (TREE / "experiment").glob("*.yaml"):
        from_dict({key: value for key, value in yaml.safe_load(experiment.read_text()).items() if key != "defaults"})


def test_the_calculator_experiment_is_complete(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    config = load_config(["experiment=calculator"]).config
    assert config.trainer.v1.trainer_mode == "separate_async"
    assert config.actor_rollout_ref.rollout.tools == {"calculator": {"latency_mean": 0.3, "latency_sigma": 0.5}}


def test_the_calculator_experiment_is_found_from_any_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    config = load_config(["experiment=calculator"]).config
    assert Path(config.actor_rollout_ref.model.path).is_dir()
    assert config.trainer.runs_dir == str(tmp_path / "runs")


def test_arguments_win_over_the_experiment():
    config = load_config(["experiment=calculator", "actor_rollout_ref.rollout.n=4"]).config
    assert config.actor_rollout_ref.rollout.n == 4


def test_a_tool_setting_is_one_argument():
    config = load_config(["experiment=calculator", "actor_rollout_ref.rollout.tools.calculator.latency_mean=0"]).config
    assert config.actor_rollout_ref.rollout.tools["calculator"]["latency_mean"] == 0


SEARCH = """
class Search:
    def __init__(self, top=5): ...
    async def call(self, arguments, ctx): ...
"""


def test_tools_are_a_list_of_names_or_of_names_with_settings(valid: list[str], tmp_path: Path):
    (tmp_path / "my.py").write_text(SEARCH)
    tools = "actor_rollout_ref.rollout.tools"
    one = load_config([*valid, f"{tools}={tmp_path}/my.py:Search"]).config
    two = load_config([*valid, f"{tools}=[calculator,{{tool:{tmp_path}/my.py:Search,top:3}}]"]).config
    assert one.actor_rollout_ref.rollout.tools == {f"{tmp_path}/my.py:Search": {}}
    assert two.actor_rollout_ref.rollout.tools == {"calculator": {}, f"{tmp_path}/my.py:Search": {"top": 3}}


def test_a_list_of_tools_replaces_those_of_an_experiment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    config = load_config(["experiment=calculator", "actor_rollout_ref.rollout.tools=[calculator]"]).config
    assert config.actor_rollout_ref.rollout.tools == {"calculator": {}}


def test_code_of_the_user_is_found_from_the_working_directory(
    valid: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my.py").write_text(SEARCH)
    monkeypatch.chdir(tmp_path)
    config = load_config([*valid, "actor_rollout_ref.rollout.tools=my.py:Search"]).config
    assert list(config.actor_rollout_ref.rollout.tools) == [f"{tmp_path}/my.py:Search"]


def test_an_experiment_of_the_user_may_build_on_a_shipped_one(tmp_path: Path):
    mine = tmp_path / "experiment" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text("# @package _global_\ndefaults: [calculator]\ntrainer: {seed: 7}\n")
    config = load_config(["experiment=mine"], config_dir=str(tmp_path)).config
    assert (config.trainer.seed, config.trainer.total_training_steps) == (7, 60)


def test_interpolation_reaches_the_defaults(valid: list[str]):
    config = load_config([*valid, "trainer.total_training_steps=${trainer.seed}"]).config
    assert config.trainer.total_training_steps == 42


def test_a_plus_before_a_key_changes_nothing(valid: list[str]):
    assert load_config([*valid, "+trainer.seed=3"]).config == load_config([*valid, "++trainer.seed=3"]).config


def test_one_file_and_a_list_of_files_are_both_fine(valid: list[str], tmp_path: Path):
    one = load_config(valid).config
    two = load_config([*valid, f"data.train_files=[{tmp_path}/train.jsonl,{tmp_path}/val.jsonl]"]).config
    assert one.data.train_files == (str(tmp_path / "train.jsonl"),)
    assert two.data.train_files == (str(tmp_path / "train.jsonl"), str(tmp_path / "val.jsonl"))


def test_derived_keys_are_filled(valid: list[str]):
    config = load_config([*valid, "trainer.seed=5", "actor_rollout_ref.actor.clip_ratio=0.3"]).config
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.seed, rollout.seed) == (5, 5)
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.strategy) == (0.3, 0.3, "fsdp2")
    assert rollout.max_model_len == 1024
    assert config.actor_rollout_ref.model.tokenizer_path == config.actor_rollout_ref.model.path


@pytest.mark.parametrize(("mode", "bypass"), [("sync", False), ("separate_async", True)])
def test_async_modes_take_the_rollout_policy_as_the_old_one(valid: list[str], mode: str, bypass: bool):
    mode_arguments = [f"trainer.v1.trainer_mode={mode}", "trainer.v1.separate_async.parameter_sync_step=2"]
    assert load_config([*valid, *mode_arguments]).config.algorithm.rollout_correction.bypass_mode is bypass


@pytest.mark.parametrize(("pi_old", "bypass"), [("bypass", True), ("snapshot", False), ("current", False)])
def test_the_old_policy_may_be_named_in_place_of_bypass_mode(valid: list[str], pi_old: str, bypass: bool):
    one_step = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    loaded = load_config([*valid, *one_step, f"algorithm.rollout_correction.pi_old={pi_old}"])
    correction = loaded.config.algorithm.rollout_correction
    assert (correction.old_policy, correction.bypass_mode) == (pi_old, bypass)
    assert bool(loaded.notes) is (pi_old == "current")


def test_an_old_policy_that_is_always_the_current_one_is_a_risk_that_is_named(valid: list[str]):
    current = (*valid, "actor_rollout_ref.actor.ppo_mini_batch_size=8", "algorithm.rollout_correction.pi_old=current")
    [note] = load_config(current).notes
    assert "has no trust region" in note
    assert "nothing (actor_rollout_ref.actor.target_kl would)" in note
    [note] = load_config([*current, "actor_rollout_ref.actor.target_kl=0.1"]).notes
    assert note.endswith("actor_rollout_ref.actor.target_kl=0.1")


@pytest.mark.parametrize("loss", ["gspo", "geo_mean", "vanilla"])
def test_losses_of_whole_sequences_averaged_over_tokens_get_a_note(valid: list[str], loss: str):
    chosen = [*valid, f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"]
    assert len(load_config(chosen).notes) == (loss != "vanilla")
    assert not load_config([*chosen, "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"]).notes


def test_what_is_printed_reads_back_as_the_same_configuration(valid: list[str]):
    config = load_config(valid).config
    assert from_dict(yaml.safe_load(to_yaml(config))) == config
    assert from_dict(to_dict(config)) == config


def test_the_configuration_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StreamRLConfig().runtime = "local"  # type: ignore[misc]


def test_simulated_runs_need_only_a_tokenizer(valid: list[str], tmp_path: Path):
    (tmp_path / "model" / "config.json").unlink()
    simulated = ["actor_rollout_ref.actor.strategy=sim", "actor_rollout_ref.rollout.name=sim", "runtime=local"]
    load_config([*valid, *simulated])


def test_every_verl_key_that_is_listed_elsewhere_is_no_key_of_ours():
    from fnmatch import fnmatchcase

    from streamrl.config.verl_keys import INERT, UNAVAILABLE

    assert not set(UNAVAILABLE) & set(known_keys())
    assert not [key for key in known_keys() for pattern in INERT if fnmatchcase(key, pattern)]


VLLM = "actor_rollout_ref.rollout.name=vllm"


def test_what_only_vllm_does_is_named_unless_it_serves(valid: list[str]):
    key = "actor_rollout_ref.rollout"
    given = [f"{key}.tensor_model_parallel_size=2", f"{key}.enforce_eager=True", f"{key}.engine_kwargs.vllm.dtype=auto"]
    served = load_config([*valid, VLLM, *given])
    assert not [name for name in served.inert if name.startswith(key)]
    rollout = served.config.actor_rollout_ref.rollout
    assert (rollout.tensor_model_parallel_size, rollout.engine_kwargs.vllm) == (2, {"dtype": "auto"})
    idle = load_config([*valid, *given])
    assert {name for name in idle.inert if name.startswith(key)} == {
        f"{key}.tensor_model_parallel_size", f"{key}.enforce_eager", f"{key}.engine_kwargs.vllm",
    }  # fmt: skip
    assert idle.config.actor_rollout_ref.rollout == load_config(valid).config.actor_rollout_ref.rollout


def test_the_defaults_of_vllms_keys_are_written_down_right():
    from streamrl.config.verl_keys import OF_VLLM

    ours = dict(flatten(to_dict(StreamRLConfig())))
    assert {key: ours[key] for key in OF_VLLM} == OF_VLLM


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("trainer.deterministic=true", "its samples depend on the batch; set name=torch"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs=3", "vllm.max_num_seqs is set by this package"),
    ],
)
def test_what_vllm_cannot_do_is_said_before_anything_starts(valid: list[str], given: str, says: str):
    with pytest.raises(ConfigError, match=says):
        load_config([*valid, VLLM, given])


SGLANG = "actor_rollout_ref.rollout.sglang"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([f"{SGLANG}.python={sys.executable}"], "does nothing with"),
        ([f"{SGLANG}.python=/no/such/python", SGLANG[:-6] + "name=sglang"], "no interpreter that can be run"),
        ([f"{SGLANG}.python={sys.executable}", f"{SGLANG}.url=http://x", SGLANG[:-6] + "name=sglang"], "one of them"),
        ([f"{SGLANG}.url=http://x", SGLANG[:-6] + "name=sglang", SGLANG[:-6] + "num_replicas=2"], "is one server"),
        (
            [f"{SGLANG}.python={sys.executable}", SGLANG[:-6] + "name=sglang", SGLANG[:-6] + "top_k=5000"],
            "sglang.engine_kwargs.sampling_mask_max_tokens",
        ),
        (
            [f"{SGLANG}.url=http://x", SGLANG[:-6] + "name=sglang", f"{SGLANG}.engine_kwargs.port=1"],
            "sglang.engine_kwargs.port is set by this package",
        ),
    ],
)
def test_how_sglang_is_reached_is_checked_before_anything_starts(valid: list[str], given: list[str], says: str):
    with pytest.raises(ConfigError, match=says):
        load_config([*valid, *given])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["actor_rollout_ref.rollout.name=vllm"], "takes the place of actor_rollout_ref.rollout.name=vllm"),
        (["actor_rollout_ref.rollout.weight_sync.backend=delta"], "backend=delta with .* is given files of full weigh"),
        (["actor_rollout_ref.rollout.weight_sync.backend=collective"], "backend=collective with .* set shm or disk"),
        (["trainer.deterministic=true"], "trainer.deterministic=true with .*server.* may depend on the batch"),
    ],
)
def test_what_a_server_of_ones_own_is_not_known_to_do_is_refused(
    valid: list[str], tmp_path: Path, given: list[str], says: str
):
    (tmp_path / "mine.py").write_text("def build(config, events): ...\n")
    with pytest.raises(ConfigError, match=says):
        load_config([*valid, f"actor_rollout_ref.rollout.server={tmp_path}/mine.py:build", *given])


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.rollout.server", "actor_rollout_ref.actor.policy_loss.loss_mode", "trainer.logger"]
)
def test_a_file_without_the_name_of_what_it_defines_says_what_there_is(valid: list[str], tmp_path: Path, key: str):
    file = tmp_path / "mine.py"
    file.write_text("def build(config, events): ...\n")
    with pytest.raises(ConfigError, match=rf"{key}={file}: expected path/to/file.py:name; it defines build"):
        load_config([*valid, f"{key}={file}"])


def test_a_server_of_ones_own_is_looked_into_before_anything_starts(valid: list[str], tmp_path: Path):
    key, file = "actor_rollout_ref.rollout.server", tmp_path / "mine.py"
    file.write_text("def build(config, events): ...\ndef other(): ...\n")
    load_config([*valid, f"{key}={file}:build"])
    for given, says in (
        (f"{file}:biuld", "defines no biuld"),
        (f"{file}:other", "f.config, events., which returns an LLMServer"),
        ("trtllm", "expected path/to/file.py:function"),
        (f"{tmp_path}/none.py:build", "there is no file"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_config([*valid, f"{key}={given}"])
