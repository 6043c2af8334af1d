"""`reward.reward_model.*`: a model that cannot score the policy's rows, or cannot in time, is refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import load_config
from streamrl.errors import ConfigError

KEY = "reward.reward_model"
FITS = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
WITHOUT_FUNCTION = "reward.custom_reward_function.path=null"


@dataclass
class Scorer:
    """A reward model's directory that fits, to be spoilt, and the arguments that name it."""

    path: Path
    arguments: list[str]

    def problem(self, *more: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config([*self.arguments, *more])
        return str(caught.value)

    def configure(self, **changes: Any) -> None:
        (self.path / "config.json").write_text(json.dumps({**FITS, **changes}))


@pytest.fixture
def scorer(valid: list[str], tmp_path: Path) -> Scorer:
    path = shutil.copytree(tmp_path / "model", tmp_path / "scorer")
    found = Scorer(path, [*valid, f"{KEY}.enable=true", f"{KEY}.model_path={path}"])
    found.configure()
    return found


def test_a_reward_model_stands_in_place_of_a_function_or_beside_one(scorer: Scorer) -> None:
    with_both = load_config(scorer.arguments)
    assert with_both.config.reward.function.endswith("reward.py:compute_score")
    assert "the score that counts is that of reward.reward_model" in with_both.notes[0]
    alone = load_config([*scorer.arguments, WITHOUT_FUNCTION])
    assert alone.config.reward.function == ""
    assert not alone.notes
    named = load_config([*scorer.arguments, WITHOUT_FUNCTION, "reward.custom_reward_function.name=last_integer"])
    assert named.config.reward.function == "last_integer"


def test_without_either_the_function_is_missed(scorer: Scorer) -> None:
    assert "custom_reward_function.path is not set" in scorer.problem(f"{KEY}.enable=false", WITHOUT_FUNCTION)
    unknown = scorer.problem(WITHOUT_FUNCTION, "reward.custom_reward_function.name=last_intege")
    assert "no reward is registered as 'last_intege'" in unknown


def test_verls_keys_mean_the_same_and_a_pool_of_its_own_is_refused(scorer: Scorer) -> None:
    pool = [f"{KEY}.enable_resource_pool=false", f"{KEY}.n_gpus_per_node=8", f"{KEY}.rollout.name=vllm"]
    found = load_config([*scorer.arguments, *pool])
    assert {f"{KEY}.n_gpus_per_node", f"{KEY}.rollout.name"} <= set(found.inert)
    old = ["reward_model.enable=true", f"reward_model.model.path={scorer.path}", "reward_model.strategy=fsdp"]
    assert load_config([*scorer.arguments[:-2], *old]).config.reward == found.config.reward
    refused = scorer.problem(f"{KEY}.enable_resource_pool=true")
    assert f"{KEY}.enable_resource_pool=true is not available yet" in refused
    assert "the training ranks hold the reward model" in refused


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "has 2 labels (id2label); a reward model has one"),
        ({"id2label": None}, "has 2 labels"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "is Qwen2ForCausalLM; a reward model is a ...ForSequence"),
        ({"architectures": None}, "is of no class"),
        ({"vocab_size": 40}, "the reward model's vocabulary has 40 tokens, the policy's tokenizer"),
        ({"max_position_embeddings": 512}, "the reward model knows 512 positions"),
    ],
)
def test_a_model_that_gives_no_score_of_these_rows_is_named(scorer: Scorer, changes: dict, problem: str) -> None:
    scorer.configure(**changes)
    found = scorer.problem()
    assert f"{KEY}.model_path: " in found
    assert problem in found


def test_a_vocabulary_may_be_padded_otherwise(scorer: Scorer) -> None:
    scorer.configure(vocab_size=4096)
    load_config(scorer.arguments)


def test_other_tokens_are_named_and_further_ones_are_not(scorer: Scorer) -> None:
    file = scorer.path / "tokenizer.json"
    read = json.loads(file.read_text())
    vocabulary = read["model"]["vocab"]
    read["added_tokens"].append({**read["added_tokens"][-1], "content": "<more>", "id": 900})
    file.write_text(json.dumps(read))
    load_config(scorer.arguments)
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(read))
    assert "2 tokens have other ids in the reward model's tokenizer than in the policy's" in scorer.problem()


def test_a_path_that_holds_no_model_is_named(scorer: Scorer) -> None:
    assert f"{KEY}.model_path=null: {KEY}.enable=true needs" in scorer.problem(f"{KEY}.model_path=null")
    assert "needs the directory of a model" in scorer.problem(f"{KEY}.model_path=/nowhere")
    (scorer.path / "config.json").write_text("{")
    assert "has no config.json that can be read" in scorer.problem()


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("algorithm.filter_groups.enable=true", "set it to false"),
        ("algorithm.adv_estimator=gdpo", "use grpo"),
    ],
)
def test_what_needs_the_scores_sooner_is_refused_with_a_remedy(scorer: Scorer, argument: str, remedy: str) -> None:
    found = scorer.problem(argument, "algorithm.gdpo_reward_keys=[right]" if "gdpo" in argument else argument)
    assert f"{argument} with {KEY}.enable=true" in found
    assert remedy in found


def test_servers_that_gave_up_their_weights_cannot_sleep_while_a_validation_is_scored(scorer: Scorer) -> None:
    asleep = ("trainer.v1.trainer_mode=colocate_async", "actor_rollout_ref.rollout.sleep_level=2")
    assert "would wake up without weights" in scorer.problem(*asleep)
    without = scorer.problem(*asleep, "trainer.val_before_train=false", "trainer.test_freq=-1")  # name=torch has none
    assert "would wake up without weights" not in without
