"""A function of the user's that cannot be called as it will be is an error at the start, which says how it will."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.algorithms.advantages import Estimator
from streamrl.config import ConfigError, load_config
from streamrl.config.classes import AGENT_LOOP, TOOL, TRACKER, Use, class_misfits
from streamrl.config.signatures import ESTIMATOR_ARGUMENTS, REWARD, misfits

VERL_ESTIMATOR = "def f(token_level_rewards, response_mask, index, epsilon=1e-6, config=None, **kwargs): ..."
VERL_LOSS = (
    "def f(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode='token-mean', config=None, "
    "rollout_is_weights=None): ..."
)
SETTINGS = {
    "reward": "reward.custom_reward_function.path={file} reward.custom_reward_function.name=f",
    "estimator": "algorithm.adv_estimator={file}:f",
    "loss": "actor_rollout_ref.actor.policy_loss.loss_mode={file}:f",
}


def arguments(setting: str, text: str, directory: Path) -> list[str]:
    file = directory / "mine.py"
    file.write_text("import math\nfrom functools import partial\n\n\n" + text + "\n")
    return SETTINGS[setting].format(file=file).split()


@pytest.mark.parametrize(
    ("setting", "text", "says"),
    [
        ("reward", "def f(solution_str, ground_truth): ...", "unexpected keyword argument 'data_source'"),
        (
            "reward",
            "def f(data_source, solution_str, ground_truth, extra_info, model): ...",
            "required argument: 'model'",
        ),
        ("reward", "def f(data_sources, solution_strs, ground_truths, extra_infos): ...", "one answer at a time"),
        ("reward", "def f(prompts, completions, **kwargs): ...", "written for TRL"),
        (
            "estimator",
            VERL_ESTIMATOR,
            "f(token_level_rewards, response_mask, index, epsilon=..., config=..., **kwargs) is called as",
        ),
        ("estimator", VERL_ESTIMATOR, "it is written for verl: here `scores` has one number per session"),
        ("estimator", "def f(token_level_rewards, response_mask): ...", "it is written for verl"),
        ("estimator", "def f(scores): ...", "f(scores, group_index)"),
        ("estimator", "def f(scores, group_index, temperature): ...", "missing a required argument: 'temperature'"),
        ("loss", VERL_LOSS, "here `inputs` has log_probs, old_log_probs, advantages and mask"),
        ("loss", "def f(inputs): ...", "is called as f(inputs, settings): too many positional arguments"),
    ],
)
def test_another_signature_is_an_error_that_names_setting_file_and_call(
    valid: list[str], tmp_path: Path, setting: str, text: str, says: str
):
    given = arguments(setting, text, tmp_path)
    with pytest.raises(ConfigError) as error:
        load_config([*valid, *given])
    (problem,) = error.value.problems
    assert problem.startswith(f"{given[0].split('=')[0]}: {tmp_path}/mine.py: f(")
    assert says in problem


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("reward", "def f(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0): ..."),
        ("reward", "async def f(solution_str, **kwargs): ..."),
        ("reward", "class F:\n    def __call__(self, **kwargs): ...\nf = F()"),
        ("reward", "def wrapped(g): return partial(g, 1)\n@wrapped\ndef f(a, b): ..."),
        ("estimator", "def f(scores, group_index, *, lengths, norm_by_std): ..."),
        ("estimator", "def f(*args, **kwargs): ..."),
        ("loss", "def f(inputs, settings): ..."),
        ("loss", "def f(inputs, settings, weight=1.0): ..."),
    ],
)
def test_what_can_be_called_or_cannot_be_told_passes(valid: list[str], tmp_path: Path, setting: str, text: str):
    load_config([*valid, *arguments(setting, text, tmp_path)])


def test_what_a_reward_is_given_besides_counts(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("def f(data_source, solution_str, ground_truth, extra_info, *, bonus): ...\n")
    assert "'bonus'" in next(misfits(file, "f", REWARD))
    assert not list(misfits(file, "f", REWARD, ("bonus",)))
    assert "'malus'" in next(misfits(file, "f", REWARD, ("bonus", "malus")))


def test_an_estimator_of_tokens_is_called_with_rewards_and_masks(tmp_path: Path):
    from streamrl.config.signatures import ESTIMATOR

    file = tmp_path / "mine.py"
    for needs, fits in (("rewards, masks, gamma", True), ("rewards, masks, theta", False)):
        file.write_text(f"@register_advantage('mine', per='token')\ndef f({needs}): ...\n")
        assert (list(misfits(file, "f", ESTIMATOR)) == []) is fits


def test_what_estimators_may_ask_for_is_what_they_are_given():
    import inspect

    taken = {*inspect.signature(Estimator.sessions).parameters, *inspect.signature(Estimator.tokens).parameters}
    assert set(ESTIMATOR_ARGUMENTS) == taken - {"self", "scores", "group_index", "rewards", "masks"}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_wrong_name_lists_what_the_file_itself_defines(valid: list[str], tmp_path: Path, setting: str):
    given = arguments(setting, "def g(): ...\ndef _h(): ...", tmp_path)
    with pytest.raises(ConfigError) as error:
        load_config([*valid, *given])
    message = str(error.value)
    assert message.endswith(("it defines g", "it has g"))


@pytest.mark.parametrize(
    ("use", "text", "says"),
    [
        (TRACKER, "def __init__(self, run): ...", "C has no method log(metrics, step) or finish()"),
        (TRACKER, "def log(self, metrics, step): ...\n    def finish(self): ...", "C() is made as C(run): too many"),
        (TOOL, "async def execute(self, arguments): ...", "C has no method call(arguments, ctx)"),
        (TOOL, "def __init__(self, depth): ...\n    async def call(self, arguments, ctx): ...", "argument: 'depth'"),
        (AGENT_LOOP, "def __init__(self, config): ...\n    async def run(self, row, ctx): ...", "argument: 'config'"),
    ],
)
def test_a_class_that_cannot_be_made_or_used_is_told(tmp_path: Path, use: Use, text: str, says: str):
    file = tmp_path / "mine.py"
    file.write_text(f"class C:\n    {text}\n")
    (problem,) = class_misfits(file, "C", use)
    assert says in problem


def test_a_tracker_without_its_methods_is_refused_before_anything_starts(valid: list[str], tmp_path: Path):
    (tmp_path / "mine.py").write_text("class Mine:\n    def __init__(self, run): ...\n")
    with pytest.raises(ConfigError, match="trainer.logger: .*mine.py: Mine has no method log"):
        load_config([*valid, f"trainer.logger=[console,'{tmp_path}/mine.py:Mine']"])
