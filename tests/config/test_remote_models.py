"""`reward.judge.*` and `distillation.teacher_model.remote.*`: what cannot work is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from streamrl.config import load_config
from streamrl.errors import ConfigError

TEACHER = "distillation.teacher_model"
URL, MODEL = "https://host/v1", "judge-7b"
JUDGE = [f"reward.judge.base_url={URL}", f"reward.judge.model={MODEL}"]
REMOTE = [
    "distillation.enabled=true", f"{TEACHER}.name=openai", f"{TEACHER}.placement=servers",
    f"{TEACHER}.remote.base_url={URL}", f"{TEACHER}.remote.model={MODEL}",
]  # fmt: skip
JUDGED = "async def compute_score(data_source, solution_str, ground_truth, extra_info, judge): ..."


def problem(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(arguments)
    return str(error.value)


@pytest.mark.parametrize(
    "written", [JUDGED, JUDGED.replace("judge)", "*, judge=None, bonus=1)"), "f = 1\ncompute_score = f"]
)
def test_a_function_that_asks_for_a_judge_gets_one(valid: list[str], tmp_path: Path, written: str) -> None:
    (tmp_path / "reward.py").write_text(written)
    config = load_config([*valid, *JUDGE, "reward.judge.key_env=JUDGE_KEY", "reward.judge.concurrency=4"]).config
    assert config.reward.judge.model == MODEL


@pytest.mark.parametrize(
    ("written", "given", "says"),
    [
        (JUDGED, [], "'judge'; reward.judge.base_url and reward.judge.model name a judge"),
        (JUDGED.replace("async ", ""), JUDGE, "it awaits answers, so it must be an async def"),
        (JUDGED.replace(", judge", ""), JUDGE, "got an unexpected keyword argument 'judge'"),
        (JUDGED, JUDGE[:1], "reward.judge.model is not set"),
        (JUDGED, ["reward.judge.key_env=K"], "reward.judge.base_url is not set"),
        (JUDGED, ["reward.judge.base_url=host:80/v1", JUDGE[1]], "expected https://host/v1"),
        (JUDGED, ["reward.judge.base_url=https://u:p@host/v1", JUDGE[1]], "give a key by key_env or key_file"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(
    valid: list[str], tmp_path: Path, written: str, given: list[str], says: str
) -> None:
    (tmp_path / "reward.py").write_text(written)
    found = problem(*valid, *given)
    assert says in found
    assert ":p@" not in found


def test_a_function_that_can_do_without_a_judge_needs_none(valid: list[str], tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(JUDGED.replace("judge)", "judge=None)"))
    assert not load_config(valid).config.reward.judge.given


def test_a_registered_reward_asks_no_judge(valid: list[str]) -> None:
    registered = ["reward.custom_reward_function.path=null", "reward.custom_reward_function.name=last_integer"]
    assert "registered rewards ask no judge" in problem(*valid, *registered, *JUDGE)


def test_a_remote_teacher_needs_no_directory_and_takes_one_with_the_policys_tokenizer(
    valid: list[str], tmp_path: Path
) -> None:
    config = load_config([*valid, *REMOTE]).config
    assert config.distillation.on_servers
    path = shutil.copytree(tmp_path / "model", tmp_path / "teacher")
    load_config([*valid, *REMOTE, f"{TEACHER}.path={path}"])
    (path / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in problem(*valid, *REMOTE, f"{TEACHER}.path={path}")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([f"{TEACHER}.placement=ranks"], f"set {TEACHER}.placement=servers"),
        ([f"{TEACHER}.num_replicas=2"], "a remote model is one"),
        ([f"{TEACHER}.remote.model=null"], f"{TEACHER}.remote.model is not set"),
        ([f"{TEACHER}.name=torch"], f"{TEACHER}.remote is for {TEACHER}.name=openai"),
        (["actor_rollout_ref.rollout.temperature=0.7"], "log-probs at temperature 1 alone"),
        (
            ["runtime=local", "trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.strategy=sim",
             "actor_rollout_ref.rollout.name=sim", "actor_rollout_ref.rollout.sim.clock=virtual"],
            "a remote model takes real time",
        ),
    ],
)  # fmt: skip
def test_a_remote_teacher_that_cannot_score_is_refused(valid: list[str], given: list[str], says: str) -> None:
    assert says in problem(*valid, *REMOTE, *given)
