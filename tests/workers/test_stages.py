"""The stages on a rank: each against plain numpy, from the columns in the queue to the columns it writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config.sections.actor import CriticConfig, CriticModelConfig, CriticOptimConfig
from streamrl.config.sections.algorithm import DistillationConfig, DistillationLossConfig, TeacherConfig
from streamrl.monitor.registry import check_step_metrics
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup, WorkerFailed
from streamrl.workers.actor import ActorWorker
from streamrl.workers.critic import CriticWorker
from streamrl.workers.settings import CriticSettings
from tests.workers.tiny import MemoryStore, make_model, make_rows, settings
from transfer_queue.metadata import KVBatchMeta

GAMMA, LAM = 0.97, 0.9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


def start(model: str, store: Any, distillation: DistillationConfig | None = None, **options: Any) -> LocalWorkerGroup:
    critic = CriticConfig(
        model=CriticModelConfig(path=model, enable_gradient_checkpointing=False), strategy="fsdp2", ppo_epochs=2,
        optim=CriticOptimConfig(lr=1e-2), cliprange_value=100.0,
    )  # fmt: skip
    actor = replace(settings(model, **options), distillation=distillation or DistillationConfig())
    workers = {
        "actor": ClassWithInitArgs(ActorWorker, actor, store),
        "critic": ClassWithInitArgs(CriticWorker, CriticSettings(critic=critic), store),
    }
    group = LocalWorkerGroup(workers)
    for view in group.spawn().values():
        view.init_model()
    return group


def told(batch: KVBatchMeta, **info: Any) -> KVBatchMeta:
    kept = {name: value for name, value in (batch.extra_info or {}).items() if name != "advantages"}
    return KVBatchMeta(batch.keys, batch.tags, batch.partition_id, extra_info={**kept, **info})


def scores_of(batch: KVBatchMeta) -> dict[str, float]:
    return {key: float(i % 3) for i, key in enumerate(batch.keys)}


def gae(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One row, token by token from the end, as if the masked ones were not there."""
    advantages, returns, after, following = np.zeros(len(mask)), np.zeros(len(mask)), 0.0, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            after = rewards[t] + GAMMA * following - values[t] + GAMMA * LAM * after
            following = values[t]
            advantages[t], returns[t] = after, after + values[t]
    return advantages, returns


def test_gae_on_the_ranks_is_that_of_the_paper_whitened_over_the_batch(model: str):
    batch, store = make_rows(3, 2)
    group = start(model, store, algorithm={"adv_estimator": "gae", "gamma": GAMMA, "lam": LAM})
    views = group.spawn()
    views["critic"].compute_values(batch)
    metrics = views["actor"].compute_advantage(told(batch, scores=scores_of(batch)))
    group.shutdown()
    expected: dict[str, np.ndarray] = {}
    for key, score in scores_of(batch).items():
        mask = store.columns["response_mask"][key]
        rewards = np.zeros(len(mask))
        rewards[np.flatnonzero(mask)[-1]] = score
        expected[key], returns = gae(rewards, store.columns["values"][key].astype(np.float64), mask)
        np.testing.assert_allclose(store.columns["returns"][key], returns, atol=1e-5)
        assert store.columns["loss_mask"][key].tolist() == mask.tolist()
    tokens = np.concatenate([expected[k][store.columns["response_mask"][k] > 0] for k in batch.keys])
    for key in batch.keys:
        mask = store.columns["response_mask"][key]
        white = (expected[key] - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8) * mask
        np.testing.assert_allclose(store.columns["advantages"][key], white, atol=1e-4)
    assert metrics["critic/returns/mean"] != 0.0
    check_step_metrics(metrics)


def test_the_critic_learns_the_returns_and_says_how_well(model: str):
    batch, store = make_rows(3, 2)
    for name, value in (("returns", 1.5), ("loss_mask", 1.0)):
        store.columns[name] = {
            key: (value * store.columns["response_mask"][key]).astype(np.float32) for key in batch.keys
        }
    group = start(model, store)
    critic = group.spawn()["critic"]
    errors = []
    for _ in range(6):
        found = critic.compute_values(batch) | critic.update_critic(batch)
        errors.append(found["critic/vf_loss"])
    group.shutdown()
    assert errors[-1] < 0.2 * errors[0]
    assert found["critic/vpred_mean"] == pytest.approx(1.5, abs=0.5)
    assert store.reads[-1] == ["input_ids", "loss_mask", "values", "returns"]
    check_step_metrics(found)


def test_a_critic_whose_gradient_is_not_finite_says_so_and_takes_no_step(model: str):
    batch, store = make_rows(1, 2)
    masks = store.columns["response_mask"]
    for name in ("returns", "loss_mask"):
        store.columns[name] = {key: masks[key].astype(np.float32) for key in batch.keys}
    store.columns["returns"][batch.keys[0]][0] = np.inf
    group = start(model, store)
    critic = group.spawn()["critic"]
    critic.compute_values(batch)
    before = critic.state_digest()
    found = critic.update_critic(batch)
    assert critic.state_digest() == before
    assert (found["critic/steps_not_finite"], found["critic/optimizer_steps"]) == (2.0, 0.0)  # ppo_epochs
    group.shutdown()
    check_step_metrics(found)


def test_the_reward_is_the_score_at_the_last_sampled_token_less_the_kl_to_the_reference(model: str):
    batch, store = make_rows(2, 2)
    for key in batch.keys:
        store.columns["response_mask"][key][-2:] = 0  # it ends on tool text
    group = start(model, store, algorithm={"use_kl_in_reward": True})
    actor = group.spawn()["actor"]
    actor.compute_ref_log_prob(batch)
    [found] = actor.compute_rewards(told(batch, scores=scores_of(batch), kl_coef=0.25))
    group.shutdown()
    means = []
    for key, score in scores_of(batch).items():
        mask = store.columns["response_mask"][key]
        kl = (store.columns["rollout_log_probs"][key] - store.columns["ref_log_prob"][key]).astype(np.float64) * mask
        expected = -0.25 * kl
        expected[np.flatnonzero(mask)[-1]] += score
        np.testing.assert_allclose(store.columns["token_level_rewards"][key], expected, atol=1e-5)
        assert found["penalty"][key] == pytest.approx(0.25 * kl.sum(), abs=1e-4)
        means.append(kl.sum() / mask.sum())
    assert (found["kl"], found["rows"]) == (pytest.approx(sum(means), abs=1e-5), len(batch.keys))


def test_at_the_start_the_reference_is_the_policy_and_later_it_stays_what_it_was(model: str):
    batch, store = make_rows(2, 2)
    group = start(model, store, bypass=False, use_kl_loss=True, kl_loss_coef=0.1)
    actor = group.spawn()["actor"]
    actor.compute_log_prob(batch)
    actor.compute_ref_log_prob(batch)
    first = {key: store.columns["ref_log_prob"][key].copy() for key in batch.keys}
    for key in batch.keys:
        np.testing.assert_allclose(first[key], store.columns["old_log_probs"][key], atol=1e-6)
    metrics = [actor.update_actor(batch) for _ in range(2)]
    actor.compute_ref_log_prob(batch)
    group.shutdown()
    assert metrics[0]["actor/kl_loss"] < metrics[1]["actor/kl_loss"]
    assert all(np.array_equal(first[key], store.columns["ref_log_prob"][key]) for key in batch.keys)
    check_step_metrics(metrics[1])


def test_without_a_reference_asking_for_it_is_an_error(model: str):
    batch, store = make_rows(1, 2)
    group = start(model, store)
    with pytest.raises(WorkerFailed, match="has no reference policy"):
        group.spawn()["actor"].compute_ref_log_prob(batch)
    group.shutdown()


def test_rejected_tokens_leave_numerator_and_denominator(model: str):
    """Half of the tokens are said to have been sampled with a probability e times that of the policy."""
    batch, store = make_rows(1, 4)
    batch.extra_info = {**(batch.extra_info or {}), "mini_batch_size": 1}
    group = start(model, store, bypass=False)
    actor = group.spawn()["actor"]
    actor.compute_log_prob(batch)
    for key in batch.keys:
        off = np.arange(len(store.columns["old_log_probs"][key])) % 2
        store.columns["rollout_log_probs"][key] = store.columns["old_log_probs"][key] + off.astype(np.float32)
    plain = actor.update_actor(batch)
    group.shutdown()

    rejecting = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    group = start(model, store, bypass=False, correction=rejecting)
    found = group.spawn()["actor"].update_actor(batch)
    group.shutdown()
    masks = [store.columns["response_mask"][key] for key in batch.keys]
    odd = sum(int((mask * (np.arange(len(mask)) % 2)).sum()) for mask in masks)
    kept = sum(int(mask.sum()) for mask in masks) - odd
    assert found["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(odd / (odd + kept))
    assert found["rollout_corr/rollout_rs_token_k1_masked_fraction"] == pytest.approx(odd / (odd + kept))
    assert found["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0
    advantages = (batch.extra_info or {})["advantages"]
    even = [(mask * (1 - np.arange(len(mask)) % 2)).sum() for mask in masks]
    on_policy = -sum(advantages[k] * n for k, n in zip(batch.keys, even, strict=True)) / kept
    assert found["actor/pg_loss"] == pytest.approx(on_policy, abs=1e-4)
    assert found["actor/pg_loss"] != pytest.approx(plain["actor/pg_loss"], abs=1e-3)
    check_step_metrics(found)


@pytest.mark.parametrize("bypass", [False, True])
def test_importance_weights_compare_with_the_old_policy_or_in_bypass_with_the_current_one(model: str, bypass: bool):
    batch, store = make_rows(1, 4)
    batch.extra_info = {**(batch.extra_info or {}), "mini_batch_size": 1}
    group = start(
        model, store, bypass=bypass,
        correction={"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True},
    )  # fmt: skip
    actor = group.spawn()["actor"]
    actor.compute_log_prob(batch)
    old = {key: store.columns["old_log_probs"][key] for key in batch.keys}
    found = actor.update_actor(batch)
    group.shutdown()
    weights = np.concatenate([
        np.minimum(np.exp(old[k] - store.columns["rollout_log_probs"][k]), 2.0)[store.columns["response_mask"][k] > 0]
        for k in batch.keys
    ])  # fmt: skip
    spread = {name: found[f"rollout_corr/rollout_is_{name}"] for name in ("mean", "std", "max", "batch_norm_factor")}
    mean = weights.mean()
    expected = {"mean": mean, "std": weights.std(), "max": weights.max(), "batch_norm_factor": mean}
    assert spread == pytest.approx(expected, rel=1e-4)
    check_step_metrics(found)


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov", "gspo", "cispo", "geo_mean", "sapo", "gpg"])
def test_every_policy_loss_trains_through_the_same_call(model: str, mode: str):
    from streamrl.config.sections.actor import PolicyLossConfig

    batch, store = make_rows(2, 4)
    group = start(model, store, policy_loss=PolicyLossConfig(loss_mode=mode, kl_cov_ratio=0.1, clip_cov_ratio=0.1))
    actor = group.spawn()["actor"]
    before = actor.state_digest()
    found = actor.update_actor(batch)
    assert np.isfinite(found["actor/pg_loss"])
    assert actor.state_digest() != before
    group.shutdown()
    check_step_metrics(found)


def test_old_log_probs_of_kept_weights_do_not_follow_the_updates(model: str):
    batch, store = make_rows(2, 2)
    group = start(model, store, bypass=False)
    actor = group.spawn()["actor"]
    actor.keep_snapshot()
    actor.compute_log_prob(batch)
    first = {key: store.columns["old_log_probs"][key].copy() for key in batch.keys}
    actor.update_actor(batch)
    actor.compute_log_prob(told(batch, snapshot=True))
    kept = {key: store.columns["old_log_probs"][key].copy() for key in batch.keys}
    actor.compute_log_prob(batch)
    group.shutdown()
    for key in batch.keys:
        np.testing.assert_allclose(kept[key], first[key], atol=1e-6)
        assert not np.allclose(store.columns["old_log_probs"][key], first[key], atol=1e-4)


@pytest.mark.parametrize(
    ("view", "method", "role", "column"),
    [
        ("actor", "compute_log_prob", "actor", "old_log_probs"),
        ("actor", "compute_ref_log_prob", "reference", "ref_log_prob"),
        ("actor", "compute_teacher_log_prob", "teacher", "teacher_log_prob"),
        ("critic", "compute_values", "critic", "values"),
    ],
)
def test_what_a_broken_model_gives_is_not_written(tmp_path: Path, view: str, method: str, role: str, column: str):
    import torch
    from transformers import Qwen2ForCausalLM

    path = make_model(tmp_path)
    lm = Qwen2ForCausalLM.from_pretrained(path)
    with torch.no_grad():
        lm.model.norm.weight[0] = torch.nan
    lm.save_pretrained(path)
    batch, store = make_rows(1, 2)
    teacher = DistillationConfig(enabled=True, teacher_model=TeacherConfig(path=path))
    group = start(path, store, bypass=False, use_kl_loss=True, distillation=teacher)
    with pytest.raises(WorkerFailed, match=rf"the {role} gives {column} that are not finite, first in row p0_0_0"):
        getattr(group.spawn()[view], method)(batch)
    group.shutdown()
    assert column not in store.columns


def test_an_empty_share_takes_part_in_every_stage(model: str):
    _, store = make_rows(1, 2)
    group = start(model, MemoryStore(store.columns), algorithm={"adv_estimator": "gae"})
    views, nothing = group.spawn(), KVBatchMeta([], [], "train", extra_info={"scores": {}, "kl_coef": 0.1})
    views["critic"].compute_values(nothing)
    views["actor"].compute_log_prob(nothing)
    views["actor"].compute_advantage(nothing)
    assert views["critic"].update_critic(nothing)["critic/vf_loss"] == 0.0
    assert views["actor"].update_actor(nothing)["actor/optimizer_steps"] == 0.0
    group.shutdown()


def test_a_policy_follows_its_teacher_on_what_it_sampled(model: str, tmp_path: Path):
    teacher = make_model(tmp_path, seed=3)
    batch, store = make_rows(2, 4)
    chosen = DistillationConfig(
        enabled=True, teacher_model=TeacherConfig(path=teacher),
        distillation_loss=DistillationLossConfig(loss_mode="k2", use_task_rewards=False),
    )  # fmt: skip
    options = replace(settings(model, lr=3e-3), distillation=chosen)
    group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, options, store))
    group.init_model()
    group.compute_teacher_log_prob(batch)
    away = []
    for _ in range(8):
        found = group.update_actor(batch)
        away.append(found["actor/distillation_loss"])
    assert away[-1] < 0.5 * away[0]
    assert found["actor/loss"] == pytest.approx(found["actor/distillation_loss"]), "task rewards are left out"
    assert "teacher_log_prob" in store.reads[-1]
    group.compute_log_prob(batch)
    group.shutdown()
    check_step_metrics(found)
    own = reference_log_probs(teacher, store.columns["input_ids"][batch.keys[0]], batch.tags[0]["response_len"])
    np.testing.assert_allclose(store.columns["teacher_log_prob"][batch.keys[0]], own, atol=1e-4)


def test_ranks_hold_no_teacher_that_stands_on_servers_and_read_what_it_wrote(model: str):
    chosen = DistillationConfig(enabled=True, teacher_model=TeacherConfig(path=model, placement="servers"))
    options = replace(settings(model), distillation=chosen)
    batch, store = make_rows(2, 2)
    store.columns["teacher_log_prob"] = {
        key: values - 0.1 for key, values in store.columns["rollout_log_probs"].items()
    }
    group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, options, store))
    group.init_model()
    with pytest.raises(Exception, match="placement=ranks"):
        group.compute_teacher_log_prob(batch)
    assert group.update_actor(batch)["actor/distillation_loss"] > 0
    group.shutdown()


def reference_log_probs(path: str, ids: np.ndarray, response: int) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    tokens = torch.from_numpy(ids)[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(input_ids=tokens).logits[0]
    return torch.log_softmax(logits[:-1], -1).gather(1, tokens[0, 1:, None])[-response:, 0].numpy()
