"""Runs whose answers a reward model on the ranks scores: in every mode, without a reward function, and by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from streamrl.monitor.events import read_events
from streamrl.monitor.metrics_log import read_metrics, read_validations
from streamrl.monitor.registry import check_step_metrics
from streamrl.monitor.schema import check_events
from streamrl.recording.record import Recording
from streamrl.trainer.deterministic import comparable
from streamrl.trainer.resume_checks import unlike
from tests.runtime.jobs import Job
from tests.runtime.test_going_on import SMALL, check_accounts, killed_after, start
from tests.runtime.test_local_run import run

POLICY = Path("examples/calculator/model")
ALONE = ("reward.reward_model.enable=true", "reward.custom_reward_function.path=null")
STEPS = 3
REAL = (
    "runtime=local", "trainer.n_gpus_per_node=1", f"trainer.total_training_steps={STEPS}", "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.tools.calculator.latency_mean=0.01",
    "trainer.test_freq=-1",
)  # fmt: skip


def make_scorer(directory: Path) -> str:
    """A random reward model of the calculator's tokens."""
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(5)
    vocabulary = json.loads((POLICY / "config.json").read_text())["vocab_size"]
    model = Qwen2ForSequenceClassification(
        Qwen2Config(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=4096, num_labels=1,
        )
    )  # fmt: skip
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(directory)
    for file in POLICY.glob("*token*"):
        shutil.copy(file, directory)
    return str(directory)


def scores_by_transformers(directory: str, rows: list[np.ndarray]) -> list[float]:
    import torch
    from transformers import AutoModelForSequenceClassification

    scorer = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return [scorer(input_ids=torch.from_numpy(np.array(ids))[None]).logits.item() for ids in rows]


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_every_mode_is_scored_once_per_update_and_validated_by_the_same_model(make_config, mode: str) -> None:
    more = ("trainer.total_training_steps=4", "trainer.test_freq=2", *SMALL[1:2], *ALONE)
    if mode == "separate_async":
        more += ("trainer.v1.separate_async.parameter_sync_step=2",)
    path, summary = run(make_config(f"trainer.v1.trainer_mode={mode}", *more))
    assert (summary.status, summary.groups.trained) == ("finished", 32)
    lines = list(read_metrics(path))
    for line in lines:
        check_step_metrics({name: value for name, value in line.items() if name != "step"})
        assert 0.0 <= line["critic/score/min"] < line["critic/score/max"] <= 1.0, "what the simulated model gives"
        assert line["timing_s/reward_model"] > 0
    events = list(read_events(path))
    check_events(events)
    per_step = 2 if mode == "separate_async" else 1
    assert sum(event.name == "reward_model" and event.kind == "span" for event in events) == 4 * per_step
    means = [line["val-aux/mean/sampled"] for line in read_validations(path)]
    assert len(means) >= 2
    assert all(0.2 < mean < 0.8 for mean in means), "numbers from 0 to 1"


def test_what_the_stage_takes_is_training_and_not_lost(make_config) -> None:
    chosen = ("actor_rollout_ref.actor.sim.token_seconds=0.01", "trainer.val_before_train=false", *ALONE)
    path, _ = run(make_config("trainer.v1.trainer_mode=sync", "trainer.total_training_steps=2", *chosen))
    for line in read_metrics(path):
        assert line["timing_s/reward_model"] > 1.0
        stages = ("reward_model", "old_log_prob", "update_actor")
        assert line["overlap/train_s"] == pytest.approx(sum(line[f"timing_s/{stage}"] for stage in stages), rel=0.02)


def test_the_functions_score_is_told_beside_the_models(make_config) -> None:
    path, _ = run(make_config("trainer.v1.trainer_mode=sync", ALONE[0], "trainer.total_training_steps=2"))
    for line in read_metrics(path):
        assert line["critic/score/max"] != line["critic/score/function/max"]
    assert any("function" in name for line in read_validations(path) for name in line)


def test_a_resumed_run_scores_again_what_was_undone_and_goes_on(make_config, tmp_path: Path) -> None:
    mode, killed = "trainer.v1.trainer_mode=separate_async", tmp_path / "killed"
    config = make_config(*SMALL, mode, "trainer.total_training_steps=5", "trainer.save_freq=2", *ALONE)
    with killed_after(3, killed):
        start(config)
    again, _ = start(config, killed)
    check_accounts(again, 5)
    function = make_config(*SMALL, mode)
    told = unlike(again / "config.yaml", function)
    assert told.startswith("reward.reward_model.enable is false and was true: rows that it was to score have no other")
    assert not unlike(killed / "config.yaml", config)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_a_policy_is_trained_on_the_scores_of_its_reward_model(make_config, tmp_path: Path, estimator: str) -> None:
    scorer = make_scorer(tmp_path / "scorer")
    more = (
        f"reward.reward_model.model_path={scorer}", "trainer.record=true", f"algorithm.adv_estimator={estimator}",
        f"algorithm.use_kl_in_reward={str(estimator == 'gae').lower()}", "trainer.v1.trainer_mode=sync",
        "reward.reward_model.max_token_len_per_gpu=256", "data.val_max_samples=4",
    )  # fmt: skip
    path, summary = run(make_config(*ALONE, *REAL, *more, base=()))
    assert (summary.status, summary.groups.trained) == ("finished", 4 * STEPS)
    recording = Recording(path)
    for line, (step, done) in zip(read_metrics(path), recording.steps.items(), strict=True):
        rows = [row for uid in done.uids for row in recording.group(uid)]
        given = np.array([row.tag["score"] for row in rows])
        own = scores_by_transformers(scorer, [row.columns["input_ids"] for row in rows])
        np.testing.assert_allclose(given, own, atol=1e-4)
        assert line["critic/score/mean"] == pytest.approx(given.mean()), step
        if estimator == "grpo":
            groups = given.reshape(len(done.uids), -1)
            advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
            assert line["critic/advantages/max"] == pytest.approx(advantages.max(), rel=1e-3)
        else:
            assert line["critic/rewards/mean"] == pytest.approx(given.mean(), abs=0.1), "less a little KL"
            assert line["critic/vf_loss"] > 0
    first, *_ = read_validations(path)
    assert first["val-aux/mean/sampled"] != 0.0


@pytest.mark.slow
def test_a_replay_has_the_same_scores_with_its_reward_model_and_without(make_config, tmp_path: Path) -> None:
    scorer = (*ALONE, f"reward.reward_model.model_path={make_scorer(tmp_path / 'scorer')}")
    chosen = (*REAL, "trainer.v1.trainer_mode=sync", "trainer.val_before_train=false", "data.val_files=[]")
    recorded, _ = run(make_config(*scorer, *chosen, "trainer.record=true", base=()))
    again, _ = run(make_config(*scorer, *chosen, f"trainer.replay={recorded}", base=()))
    without, _ = run(make_config(*chosen, f"trainer.replay={recorded}", base=()))
    figures = ("critic/score/mean", "critic/advantages/max", "actor/grad_norm")
    before, scored, kept = (
        [[line[name] for name in figures] for line in read_metrics(path)] for path in (recorded, again, without)
    )
    assert scored == before
    assert kept == before, "rows are recorded with the score that counted"


@pytest.mark.slow
def test_a_deterministic_run_that_was_killed_ends_with_the_same_scores_bit_for_bit(make_config, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    config = make_config(
        *ALONE, *REAL, f"reward.reward_model.model_path={make_scorer(tmp_path / 'scorer')}", "trainer.save_freq=1",
        "trainer.val_before_train=false", "data.val_files=[]", "trainer.deterministic=true",
        "trainer.v1.trainer_mode=separate_async", base=(),
    )  # fmt: skip
    with killed_after(2, killed):
        whole, _ = start(config)
    again, _ = start(config, killed)
    assert [comparable(line) for line in read_metrics(again)] == [comparable(line) for line in read_metrics(whole)]


@pytest.mark.slow
def test_two_ranks_in_processes_of_their_own_share_the_rows(tmp_path: Path) -> None:
    scorer = make_scorer(tmp_path / "scorer")
    job = Job(
        tmp_path, *ALONE, f"reward.reward_model.model_path={scorer}", "trainer.n_gpus_per_node=2",
        "trainer.record=true", "trainer.v1.trainer_mode=colocate_async", "data.val_max_samples=2",
        "actor_rollout_ref.ref.fsdp_config.param_offload=true", "monitor.terminal=false",
        steps=2, batch=4, seconds=300.0,
    )  # fmt: skip
    job.start()
    job.finish()
    recording = Recording(job.path)
    for line, done in zip(read_metrics(job.path), recording.steps.values(), strict=True):
        rows = [row for uid in done.uids for row in recording.group(uid)]
        own = scores_by_transformers(scorer, [row.columns["input_ids"] for row in rows])
        np.testing.assert_allclose([row.tag["score"] for row in rows], own, atol=1e-4)
        assert line["critic/score/mean"] == pytest.approx(np.mean(own), abs=1e-4)
