"""A DataProto in hand and rows in the queue: the same methods, the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.config.sections.actor import CriticConfig, CriticModelConfig, CriticOptimConfig
from streamrl.protocol import DataProto
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup, WorkerFailed, WorkerGroup
from streamrl.single_controller.decorator import MeshDispatch, registered_methods
from streamrl.workers.actor import ActorWorker
from streamrl.workers.contract import WRITES
from streamrl.workers.critic import CriticWorker
from streamrl.workers.held_rows import references_to
from streamrl.workers.row_store import NoRows
from streamrl.workers.settings import CriticSettings
from tests.workers.tiny import MemoryStore, make_model, make_rows, settings
from transfer_queue.keys import split_row_key
from transfer_queue.metadata import KVBatchMeta

P, R = 11, 26
"""Widths with room on both sides of every row."""
OF_ROWS = ("old_log_probs", "entropy", "ref_log_prob", "values", "token_level_rewards", "advantages", "returns")
SAMPLED = ("response_mask", "rollout_log_probs", "weight_versions")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


def roles(model: str, store: Any) -> dict[str, ClassWithInitArgs]:
    chosen = settings(
        model, bypass=False, use_kl_loss=True, loss_agg_mode="seq-mean-token-mean",
        algorithm={"adv_estimator": "gae", "gamma": 0.97, "lam": 0.9, "use_kl_in_reward": True},
    )  # fmt: skip
    critic = CriticConfig(
        model=CriticModelConfig(path=model, enable_gradient_checkpointing=False), strategy="fsdp2",
        optim=CriticOptimConfig(lr=1e-2),
    )  # fmt: skip
    return {
        "actor": ClassWithInitArgs(ActorWorker, chosen, store),
        "critic": ClassWithInitArgs(CriticWorker, CriticSettings(critic=critic), store),
    }


def local(model: str, store: Any) -> dict[str, WorkerGroup]:
    return started(LocalWorkerGroup(roles(model, store)))


def started(group: WorkerGroup) -> dict[str, WorkerGroup]:
    views = group.spawn()
    for view in views.values():
        view.init_model()
    return views


@pytest.fixture
def groups(model: str) -> Iterator[dict[str, WorkerGroup]]:
    views = local(model, NoRows())
    yield views
    views["actor"].shutdown()


def in_hand(batch: KVBatchMeta, store: MemoryStore, *, seed: int = 1) -> DataProto:
    """The same rows as padded tensors, with anything at all where there is padding."""
    rng, size = np.random.default_rng(seed), len(batch)
    ids, mask = rng.integers(0, 64, (size, P + R)), np.zeros((size, P + R), np.int64)
    columns = {name: rng.integers(1, 9, (size, R)).astype(store.columns[name][batch.keys[0]].dtype) for name in SAMPLED}
    scores = np.zeros((size, R), np.float32)
    for i, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
        p, r = tag["prompt_len"], tag["response_len"]
        ids[i, P - p : P + r], mask[i, P - p : P + r] = store.columns["input_ids"][key], 1
        for name, column in columns.items():
            column[i, :r] = store.columns[name][key]
        scores[i, r // 2] = i % 3
    names = [split_row_key(key) for key in batch.keys]
    columns |= {"input_ids": ids, "attention_mask": mask, "responses": ids[:, P:], "token_level_scores": scores}
    return DataProto.from_dict(
        {name: torch.from_numpy(values) for name, values in columns.items()},
        {"uid": [name.uid for name in names], "session": np.array([name.session for name in names])},
        {"mini_batch_size": 2, "temperature": 1.0, "version": 3, "kl_coef": 0.25},
    )


def through_the_queue(views: dict[str, WorkerGroup], batch: KVBatchMeta) -> dict[str, float]:
    actor, critic, metrics = views["actor"], views["critic"], {}
    scores = {key: float(i % 3) for i, key in enumerate(batch.keys)}
    info = {"mini_batch_size": 2, "temperature": 1.0, "version": 3, "kl_coef": 0.25, "scores": scores}
    batch = KVBatchMeta(batch.keys, batch.tags, "train", extra_info=info)
    metrics |= actor.compute_log_prob(batch) | actor.compute_ref_log_prob(batch) | critic.compute_values(batch)
    parts = actor.compute_rewards(batch)
    metrics["actor/reward_kl_penalty"] = sum(part["kl"] for part in parts) / sum(part["rows"] for part in parts)
    metrics |= actor.compute_advantage(batch) | critic.update_critic(batch)
    batch.extra_info = {**info, "advantage_columns": True}
    return metrics | actor.update_actor(batch)


def with_a_data_proto(views: dict[str, WorkerGroup], data: DataProto) -> tuple[DataProto, dict[str, float]]:
    actor, critic, metrics = views["actor"], views["critic"], {}
    stages = (
        actor.compute_log_prob, actor.compute_ref_log_prob, critic.compute_values, actor.compute_rewards,
        actor.compute_advantage, critic.update_critic, actor.update_actor,
    )  # fmt: skip
    for stage in stages:
        found = stage(data)
        metrics |= found.meta_info.pop("metrics")
        data = data.union(found)
    return data, metrics


def assert_same(data: DataProto, metrics: dict[str, float], batch: KVBatchMeta, store: MemoryStore, expected: Any):
    for name in OF_ROWS:
        for i, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            row = data.batch[name][i].numpy()  # type: ignore[index]
            np.testing.assert_allclose(row[: tag["response_len"]], store.columns[name][key], atol=1e-6, err_msg=name)
            assert not row[tag["response_len"] :].any(), f"{name} is not 0 where there is padding"
    measured = [name for name in expected if "timing" not in name and "seconds" not in name and "bytes" not in name]
    assert {name: metrics[name] for name in measured} == pytest.approx({n: expected[n] for n in measured}, abs=1e-6)


def test_every_stage_gives_the_numbers_of_the_queue_whatever_is_in_the_padding(model: str, groups: Any):
    batch, store = make_rows(4, 3)
    queue = local(model, store)
    expected = through_the_queue(queue, batch)
    data, metrics = with_a_data_proto(groups, in_hand(batch, store))
    assert_same(data, metrics, batch, store, expected)
    assert min(expected["actor/grad_norm"], expected["critic/grad_norm"]) > 0.0
    trained = groups["actor"].compute_log_prob(in_hand(batch, store)).batch["old_log_probs"]
    queue["actor"].compute_log_prob(batch)
    for row, key, old in zip(trained.numpy(), batch.keys, data.batch["old_log_probs"].numpy(), strict=True):  # type: ignore[index]
        now = store.columns["old_log_probs"][key]
        np.testing.assert_allclose(row[: len(now)], now, atol=1e-6)
        assert not np.allclose(row, old, atol=1e-4)
    queue["actor"].shutdown()


def test_rows_of_padding_alone_count_in_no_denominator(model: str, groups: Any):
    batch, store = make_rows(4, 3)
    queue = local(model, store)
    expected = through_the_queue(queue, batch)
    queue["actor"].shutdown()
    data = in_hand(batch, store)
    padding = data.select_idxs([0, 1])
    padding.batch["attention_mask"][:] = 0  # type: ignore[index]
    padding.batch["token_level_scores"][:] = 0  # type: ignore[index]
    padding.non_tensor_batch["session"] = np.array([7, 8])
    data, metrics = with_a_data_proto(groups, DataProto.concat([data, padding]))
    assert_same(data, metrics, batch, store, expected)
    assert not data.batch["advantages"][-2:].any()  # type: ignore[index]


def test_ragged_tensors_give_the_numbers_of_padded_ones(groups: Any):
    batch, store = make_rows(2, 3)
    padded = groups["actor"].compute_log_prob(in_hand(batch, store)).batch["old_log_probs"]
    ragged = {
        name: torch.nested.nested_tensor(
            [torch.from_numpy(store.columns[name][k]) for k in batch.keys], layout=torch.jagged
        )
        for name in ("input_ids", "response_mask")
    }
    found = groups["actor"].compute_log_prob(DataProto.from_dict(ragged, meta_info={"temperature": 1.0}))
    for row, expected in zip(found.batch["old_log_probs"].unbind(), padded, strict=True):
        torch.testing.assert_close(row, expected[: len(row)], atol=1e-6, rtol=0.0)


def test_scalar_advantages_train_as_those_of_the_queue(model: str, groups: Any):
    batch, store = make_rows(4, 3)
    assert batch.extra_info
    batch.extra_info["mini_batch_size"] = 2
    queue, data = local(model, store), in_hand(batch, store)
    data.non_tensor_batch["advantage"] = np.array([*batch.extra_info["advantages"].values()])
    for method in ("compute_log_prob", "compute_ref_log_prob"):
        getattr(queue["actor"], method)(batch)
        data.union(getattr(groups["actor"], method)(data))
    expected, found = queue["actor"].update_actor(batch), groups["actor"].update_actor(data).meta_info["metrics"]
    queue["actor"].shutdown()
    for name in ("actor/loss", "actor/grad_norm", "actor/kl_loss", "actor/optimizer_steps", "loss_mask/ratio"):
        assert found[name] == pytest.approx(expected[name], abs=1e-6), name


def test_ranks_that_share_rows_get_the_same_ones_of_a_method_of_the_critic_too():
    """Split by data-parallel rank in the mesh of the model, not by rank."""
    for worker in (ActorWorker, CriticWorker):
        methods = registered_methods(worker)
        for name in WRITES.keys() & methods.keys():
            dispatch = methods[name].dispatch
            assert isinstance(dispatch, MeshDispatch)
            assert dispatch.mesh == worker.role


@pytest.mark.slow
def test_two_ranks_share_rows_that_do_not_divide_and_give_the_numbers_of_one(
    model: str, ray_cluster: None, groups: Any
):
    from streamrl.single_controller import RayWorkerGroup, ResourcePool

    batch, store = make_rows(3, 3)
    data, expected = with_a_data_proto(groups, in_hand(batch, store))
    ranks = RayWorkerGroup(ResourcePool([2]), roles(model, NoRows()), env={"OMP_NUM_THREADS": "1"})
    found, metrics = with_a_data_proto(started(ranks), in_hand(batch, store))
    ranks.shutdown()
    for name in OF_ROWS:
        torch.testing.assert_close(found.batch[name], data.batch[name], atol=2e-6, rtol=0.0)  # type: ignore[index]
    for name in ("actor/loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "actor/reward_kl_penalty"):
        assert metrics[name] == pytest.approx(expected[name], abs=1e-5), name
    assert metrics["rows/trained"] == 9.0


def test_scalar_advantages_of_sessions_and_rewards_of_tokens_are_taken_as_they_are():
    batch, store = make_rows(1, 2)
    data = in_hand(batch, store)
    data.non_tensor_batch["advantage"] = np.array([1.5, -0.5])
    meta = references_to(data)
    assert meta.extra_info is not None
    assert meta.extra_info["advantages"] == dict(zip(batch.keys, (1.5, -0.5), strict=True))
    assert not meta.extra_info["reward_columns"]
    data.batch["token_level_rewards"] = torch.zeros(2, R)  # type: ignore[index]
    assert (references_to(data).extra_info or {})["reward_columns"]
    assert (meta.keys, meta.tags) == (batch.keys, batch.tags)


def test_what_does_not_fit_is_an_error_that_says_so(groups: Any):
    batch, store = make_rows(1, 2)
    good = in_hand(batch, store)
    with pytest.raises(ValueError, match="no tensor 'attention_mask'"):
        references_to(good.select(["input_ids", "responses"]))
    holed = in_hand(batch, store)
    holed.batch["attention_mask"][0, P] = 0  # type: ignore[index]
    with pytest.raises(ValueError, match="padded on the right"):
        references_to(holed)
    dense = in_hand(batch, store)
    dense.batch["token_level_scores"][1, :2] = 1.0  # type: ignore[index]
    with pytest.raises(ValueError, match="row p0_1_0 has scores at 3 tokens"):
        references_to(dense)
    with pytest.raises(WorkerFailed, match="no tensor 'old_log_probs'"):
        groups["actor"].update_actor(good)
    with pytest.raises(WorkerFailed, match="has no queue"):
        groups["actor"].update_actor(batch)
