"""What verl's users type starts here."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.cli import main, train
from streamrl.config import load_config
from streamrl.config.from_verl import overrides_of, translate, translate_file
from streamrl.config.keys import flatten
from streamrl.config.schema import known_keys
from streamrl.config.shell_script import commands
from streamrl.config.verl_keys import SUBSTITUTED, VERL_DEFAULTS
from tests.config.verl_lines import LINES, arguments

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize("name", LINES)
def test_a_command_line_of_verl_starts_with_only_the_module_name_changed(valid: list[str], tmp_path: Path, name: str):
    loaded = load_config([*arguments(name, tmp_path), f"trainer.runs_dir={tmp_path}/runs"], like_verl=True)
    by_vllm = loaded.config.actor_rollout_ref.rollout.name == "vllm"
    assert (f"{ROLLOUT}.gpu_memory_utilization" in loaded.inert) != by_vllm
    assert len(loaded.inert) == len(set(loaded.inert))
    assert loaded.config.trainer.n_gpus_per_node == 8


def test_a_line_of_verl_passes_the_whole_start(valid: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train([*arguments("GRPO", tmp_path), f"trainer.runs_dir={tmp_path}/runs", "--dry-run"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "this machine would refuse the run" not in line]
    note, micro_batches, _ = said
    assert note.startswith("note: without effect here, kept for verl's sake: ")
    assert micro_batches.startswith(
        f"note: {ACTOR}.ppo_micro_batch_size_per_gpu=4, actor_rollout_ref.ref.log_prob_micro"
    )
    assert f"{ROLLOUT}.free_cache_engine" in note
    assert f"{ROLLOUT}.enforce_eager" not in note


@pytest.mark.parametrize("name", LINES)
def test_a_translated_line_is_the_same_run_without_a_note(valid: list[str], tmp_path: Path, name: str):
    line, place = arguments(name, tmp_path), f"trainer.runs_dir={tmp_path}/runs"
    translation = translate(line)
    assert translation.problems == []
    again = load_config([*translation.arguments, place])
    assert again.config == load_config([*line, place], like_verl=True).config
    assert again.inert == ()


def one_line(word: str) -> bool:
    return "\\\n" not in word


SCRIPT = """\
#!/usr/bin/env bash
set -xeuo pipefail
# the model, unless the caller names one
export HYDRA_FULL_ERROR=1
MODEL_PATH=${MODEL_PATH:-"models/qwen"}   # relative
n=4; max_prompt=$((256 * 2))
max_response=$((max_prompt + 1024 * (1 + 1)))
RUN="run-$(date +%d)"
DATA=(
    data.max_prompt_length=${max_prompt}   # tokens
    data.max_response_length="$max_response"
)
if [ -d "$MODEL_PATH" ]; then echo "found > it"; fi
cd $HOME && VLLM_USE_V1=1 python3 -m verl.trainer.main_ppo --config-name='ppo_trainer' \\
    algorithm.adv_estimator=grpo "${DATA[@]}" \\
    data.train_files="['$HOME/a.parquet', '$HOME/b.parquet']" \\
    actor_rollout_ref.model.path=$MODEL_PATH actor_rollout_ref.rollout.n=$n \\
    trainer.experiment_name=$RUN trainer.project_name='my project' \\
    trainer.device=cpu $@ 2>&1 | tee train.log
echo done
"""


def test_the_arguments_are_read_out_of_a_shell_script():
    assert overrides_of(SCRIPT) == [
        "--config-name=ppo_trainer",
        "algorithm.adv_estimator=grpo",
        "data.max_prompt_length=512",
        "data.max_response_length=2560",
        "data.train_files=['$HOME/a.parquet', '$HOME/b.parquet']",
        "actor_rollout_ref.model.path=models/qwen",
        "actor_rollout_ref.rollout.n=4",
        "trainer.experiment_name=run-$(date +%d)",
        "trainer.project_name=my project",
        "trainer.device=cpu",
    ]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), min_size=1).filter(one_line)))
def test_quoted_arguments_come_back_as_they_were(words: list[str]):
    assert overrides_of("python -m verl.trainer.main_ppo " + shlex.join(words)) == words


@given(st.text(st.sampled_from("ab=.$(){}[]'\"\\ \n#;&|<>:-+*/1@")))
def test_any_text_is_read_or_refused(text: str):
    with suppress(ValueError):  # a quotation that is not closed
        assert all(commands(text))


def written(tmp_path: Path, *words: str) -> str:
    file = tmp_path / "run.sh"
    file.write_text("python -m verl.trainer.main_ppo " + " ".join(words) + "\n")
    return str(file)


def test_the_command_printed_reads_back_as_the_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["trainer.n_gpus_per_node=2", "'trainer.logger=[console, clearml]'", "data.train_files=$HOME/a.parquet"]
    assert main(["config", "from-verl", written(tmp_path, *words, "trainer.balance_batch=True")]) == 0
    output = capsys.readouterr()
    assert shlex.split(output.out.replace("\\\n", "")) == [
        "streamrl", "train", "trainer.n_gpus_per_node=2", "trainer.logger=[console]",
        "data.train_files=$HOME/a.parquet", "algorithm.adv_estimator=gae",
        "actor_rollout_ref.rollout.n=1", "trainer.device=cuda", "actor_rollout_ref.rollout.val_kwargs.temperature=0",
    ]  # fmt: skip
    assert '"data.train_files=$HOME/a.parquet"' in output.out
    inert, added, reward = output.err.splitlines()
    assert inert == "note: left out, without effect here: trainer.logger=clearml, trainer.balance_batch"
    assert added.startswith("note: written out, because verl's default is another: algorithm.adv_estimator=gae, ")
    assert "reward.custom_reward_function.path" in reward


def test_every_key_that_asks_too_much_is_an_error_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["trainer.nonsense=1", "data.train_batch_size=many", "actor_rollout_ref.model.trust_remote_code=True"]
    assert main(["config", "from-verl", written(tmp_path, *words, "--config-name=mine")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    first, second, third, fourth = output.err.splitlines()
    assert first.startswith("error: unknown key trainer.nonsense")
    assert second.startswith("error: data.train_batch_size=many is not allowed")
    assert third.startswith("error: actor_rollout_ref.model.trust_remote_code=true is not available yet")
    assert fourth.startswith("error: --config-name=mine: only key=value is translated")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo hello\n", "found no command that starts verl"),
        ("python -m verl.trainer.main_ppo a='b\n", "line 1: a quotation is not closed"),
    ],
)
def test_a_file_that_starts_no_verl_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str):
    (tmp_path / "run.sh").write_text(text)
    assert main(["config", "from-verl", str(tmp_path / "run.sh")]) == 2
    assert says in capsys.readouterr().err
    assert main(["config", "from-verl", str(tmp_path / "nowhere.sh")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_quotes_are_only_as_many_as_needed(tmp_path: Path):
    script = written(
        tmp_path, "data.train_files=\"['/data/a.parquet','/data/b.parquet']\"", "trainer.logger='[console]'"
    )
    command = translate_file(script).command()
    assert """ "data.train_files=['/data/a.parquet','/data/b.parquet']" """.strip() in command
    assert "'trainer.logger=[console]'" in command


def test_a_verl_line_started_here_names_the_defaults_it_relies_on_as_from_verl_writes_them_out(
    valid: list[str], tmp_path: Path
):
    line = ["algorithm.adv_estimator=grpo", "trainer.device=cpu", "trainer.v1.trainer_mode=separate_async",
            "trainer.v1.separate_async.parameter_sync_step=2"]  # fmt: skip
    told = [text.split("=")[0] for text in load_config([*valid, *line]).unlike_verl]
    assert told == [text.split("=")[0] for text in translate(line).added]
    assert "algorithm.rollout_correction.bypass_mode" in told
    assert load_config([*valid, *line]).unlike_verl[0] == f"{ROLLOUT}.n=8 (verl: 1)"


def test_what_only_names_verls_own_defaults_is_no_argument():
    line = ["--config-path=config", "--config-name=ppo_trainer", "trainer.nnodes=1"]
    assert translate(line).problems == []
    assert translate(line).arguments == ["trainer.nnodes=1"]


def test_what_stands_in_for_a_value_of_verl_exists_and_the_value_does_not(valid: list[str]):
    for key, values in SUBSTITUTED.items():
        for value, ours in values.items():
            assert value == "sglang" or f"{value}'" not in str(known_keys()[key])
            assert f"{key}={value} ({ours} instead)" in load_config([*valid, f"{key}={value}"], like_verl=True).inert


@pytest.mark.parametrize(
    ("name", "says"),
    [("sglang", "sglang.python, the interpreter"), ("trtllm", "rollout.server=path"), ("hf", "rollout.server=path")],
)
def test_a_kind_of_server_that_cannot_be_had_is_an_error_but_in_a_line_of_verls(
    valid: list[str], capsys: pytest.CaptureFixture[str], name: str, says: str
):
    assert train([*valid, f"{ROLLOUT}.name={name}", "--dry-run"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {ROLLOUT}.name={name}")
    assert says in error
    assert train([*valid, f"{ROLLOUT}.name={name}", "--dry-run", "--verl"]) == 0
    assert f"{ROLLOUT}.name={name} (torch instead)" in capsys.readouterr().err


def test_sglang_stays_what_it_is_where_it_can_be_reached(valid: list[str]):
    line = [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.sglang.python={sys.executable}", f"{ROLLOUT}.data_parallel_size=2"]
    loaded = load_config([*valid, *line])
    assert (loaded.config.actor_rollout_ref.rollout.name, loaded.inert) == ("sglang", ())
    assert loaded.config.actor_rollout_ref.rollout.data_parallel_size == 2


def test_a_default_of_verl_is_listed_only_where_ours_is_another():
    from streamrl.config import StreamRLConfig, to_dict

    ours: dict[str, Any] = dict(flatten(to_dict(StreamRLConfig())))
    assert not [key for key, value in VERL_DEFAULTS.items() if ours[key] == value]


def test_a_script_that_hands_its_arguments_on_still_does(tmp_path: Path):
    script = tmp_path / "run.sh"
    for ending, passes_on in ((' "$@"\n', True), ("\n", False)):
        script.write_text(f"python3 -m verl.trainer.main_ppo trainer.total_epochs=2{ending}")
        assert translate_file(str(script)).command().endswith('  "$@"\n') is passes_on
