"""The actor on one rank in this process, against a plain PyTorch reference."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.config.sections.actor import PolicyLossConfig
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup, WorkerFailed
from streamrl.single_controller.dispatch import mini_batch_indices
from streamrl.workers.actor import ActorWorker
from tests.workers.tiny import MemoryStore, make_model, make_rows, settings
from transfer_queue.metadata import KVBatchMeta

GPG = PolicyLossConfig(loss_mode="gpg")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


def start(model: str, store: Any, *, skip: bool = True, **options: Any) -> LocalWorkerGroup:
    chosen = replace(settings(model, **options), skip_zero_advantage=skip)
    group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, chosen, store))
    group.init_model()
    return group


class Reference:
    """The same update in plain PyTorch: one process, one row at a time, no padding, no micro-batches."""

    def __init__(self, model: str, lr: float = 1e-3) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.01)

    def log_probs(self, ids: np.ndarray, response: int, temperature: float = 1.0) -> torch.Tensor:
        tokens = torch.from_numpy(ids)[None]
        logits = self.model(input_ids=tokens).logits[0] / temperature
        return torch.log_softmax(logits[:-1], -1).gather(1, tokens[0, 1:, None])[-response:, 0]

    def update(self, batch: KVBatchMeta, store: MemoryStore) -> list[float]:
        losses = []
        info = batch.extra_info or {}
        index = mini_batch_indices(batch.keys, info["mini_batch_size"])
        for number in range(max(index) + 1):
            keys = [key for key, i in zip(batch.keys, index, strict=True) if i == number]
            total = sum(int(store.columns["response_mask"][key].sum()) for key in keys)
            loss = torch.zeros(())
            for key in keys:
                mask = torch.from_numpy(store.columns["response_mask"][key]).float()
                new = self.log_probs(store.columns["input_ids"][key], len(mask))
                ratio = (new - torch.from_numpy(store.columns["rollout_log_probs"][key])).exp()
                a = info["advantages"][key]
                objective = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
                if a < 0:
                    objective = objective.clamp(min=3.0 * a)
                loss = loss - (objective * mask).sum() / total
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def test_loss_curve_is_that_of_a_plain_reference(model: str) -> None:
    batch, store = make_rows(4, 3)
    reference, group = Reference(model), start(model, store)
    for _ in range(4):
        expected = reference.update(batch, store)
        metrics = group.update_actor(batch)
        assert metrics["actor/optimizer_steps"] == len(expected) == 2
        assert metrics["actor/pg_loss"] == pytest.approx(np.mean(expected), abs=1e-5)
    group.shutdown()


def test_result_does_not_depend_on_the_cut_into_micro_batches(model: str) -> None:
    batch, store = make_rows(4, 3)
    found = []
    for tokens in (1, 96, 100_000):
        group = start(model, store, ppo_max_token_len_per_gpu=tokens)
        metrics = [group.update_actor(batch) for _ in range(3)]
        found.append([(m["actor/pg_loss"], m["actor/grad_norm"], m["actor/entropy"]) for m in metrics])
        group.shutdown()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_shifted_cut_to_the_response_and_after_temperature(
    tmp_path: Path, kind: str, temperature: float
) -> None:
    path = make_model(tmp_path, kind=kind)
    batch, store = make_rows(3, 2)
    batch.extra_info = {**(batch.extra_info or {}), "temperature": temperature}
    reference, group = Reference(path), start(path, store)
    group.compute_log_prob(batch)
    group.shutdown()
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        with torch.no_grad():
            expected = reference.log_probs(store.columns["input_ids"][key], tag["response_len"], temperature)
        written = store.columns["old_log_probs"][key]
        assert written.dtype == np.float32
        np.testing.assert_allclose(written, expected.numpy(), atol=2e-5)
        assert store.columns["entropy"][key].shape == (tag["response_len"],)
        assert store.tags[key] == {"old_log_probs_version": 3}


def test_on_policy_the_ratio_is_one(model: str) -> None:
    batch, store = make_rows(4, 2)
    batch.extra_info = {**(batch.extra_info or {}), "mini_batch_size": 4}
    group = start(model, store, bypass=False)
    group.compute_log_prob(batch)
    metrics = group.update_actor(batch)
    group.shutdown()
    assert abs(metrics["actor/ppo_kl"]) < 1e-4
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_with_the_current_policy_as_the_old_one_an_update_is_one_of_plain_reinforce(model: str) -> None:
    batch, store = make_rows(4, 2)
    batch.extra_info = {**(batch.extra_info or {}), "mini_batch_size": 4}
    found = []
    cases: list[dict[str, Any]] = [{"bypass": False, "correction": {"pi_old": "current"}}, {"policy_loss": GPG}]
    for options in cases:
        group = start(model, store, **options)
        found.append((group.update_actor(batch), group.state_digest()))
        group.shutdown()
    (current, digest), (plain, reinforced) = found
    assert current["actor/ppo_kl"] == current["actor/pg_clipfrac"] == 0.0
    assert current["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-6)
    assert digest == reinforced, "to the last bit"
    assert all("old_log_probs" not in fields for fields in store.reads)


def test_reads_only_the_declared_fields_and_counts_their_bytes(model: str) -> None:
    batch, store = make_rows(2, 2)
    group = start(model, store)
    metrics = group.update_actor(batch)
    group.compute_log_prob(batch)
    group.shutdown()
    fields = ["input_ids", "response_mask", "rollout_log_probs"]
    assert store.reads == [fields, ["input_ids"]]
    assert metrics["data/bytes_read"] == sum(store.columns[f][key].nbytes for f in fields for key in batch.keys)


def test_tokens_that_are_too_old_and_excluded_rows_leave_the_loss_and_its_denominator(model: str) -> None:
    batch, store = make_rows(2, 2)
    info = {**(batch.extra_info or {}), "mini_batch_size": 2, "max_age": 1, "excluded": [batch.keys[0]]}
    batch.extra_info = info
    group = start(model, store)
    metrics = group.update_actor(batch)
    group.shutdown()
    young = {key: (store.columns["weight_versions"][key] >= 2) for key in batch.keys}
    kept = sum(int(young[key].sum()) for key in batch.keys[1:])
    sampled = sum(int(store.columns["response_mask"][key].sum()) for key in batch.keys)
    assert metrics["loss_mask/ratio"] == pytest.approx(kept / sampled)
    assert metrics["training/off_policy/token_staleness/max"] == 3.0


def test_leaving_out_rows_of_advantage_zero_changes_no_gradient(model: str) -> None:
    batch, store = make_rows(4, 2)
    assert batch.extra_info
    batch.extra_info["advantages"] = {k: a if k[1] in "02" else 0.0 for k, a in batch.extra_info["advantages"].items()}
    found = []
    for skip in (True, False):
        group = start(model, store, skip=skip)
        found.append([group.update_actor(batch) for _ in range(3)])
        group.shutdown()
    for skipped, whole in zip(*found, strict=True):
        assert skipped["actor/grad_norm"] == pytest.approx(whole["actor/grad_norm"], rel=1e-4)
        assert skipped["actor/pg_loss"] == pytest.approx(whole["actor/pg_loss"], abs=1e-6)
        assert skipped["actor/computed/tokens"] < whole["actor/computed/tokens"] == whole["perf/total_num_tokens"]


def test_a_batch_in_which_nothing_counts_takes_no_step(model: str) -> None:
    batch, store = make_rows(2, 2)
    batch.extra_info = {**(batch.extra_info or {}), "excluded": list(batch.keys)}
    group = start(model, store)
    before = group.state_digest()
    metrics = group.update_actor(batch)
    assert metrics["actor/optimizer_steps"] == 0.0
    assert group.state_digest() == before
    group.shutdown()


def test_a_row_without_an_advantage_is_an_error_that_names_it(model: str) -> None:
    batch, store = make_rows(2, 2)
    assert batch.extra_info
    del batch.extra_info["advantages"][batch.keys[1]]
    group = start(model, store)
    with pytest.raises(WorkerFailed, match=f"{batch.keys[1]} counts in the loss"):
        group.update_actor(batch)
    group.shutdown()


def test_published_weights_are_the_models_own(model: str, tmp_path: Path) -> None:
    from streamrl.weight_sync import WeightStore

    batch, store = make_rows(2, 2)
    group = start(model, store)
    group.update_actor(batch)
    info = group.publish_weights(7, str(tmp_path))
    digest = group.state_digest()
    group.shutdown()
    latest = WeightStore(tmp_path).latest()
    assert latest is not None
    assert (info.version, info.path, info.bytes) == (7, latest.path, latest.bytes)
    reference = Reference(model)
    published = WeightStore(tmp_path).read(info.path)
    assert set(published) == {name for name, _ in reference.model.named_parameters()}
    assert math.isclose(len(digest), 64)


def test_checkpoint_restores_weights_optimizer_and_the_next_losses(model: str, tmp_path: Path) -> None:
    batch, store = make_rows(4, 2)
    group = start(model, store)
    group.update_actor(batch)
    group.save_checkpoint(str(tmp_path / "c"))
    digest = group.state_digest()
    following = [group.update_actor(batch)["actor/pg_loss"] for _ in range(2)]
    group.load_checkpoint(str(tmp_path / "c"))
    assert group.state_digest() == digest
    assert [group.update_actor(batch)["actor/pg_loss"] for _ in range(2)] == following
    group.shutdown()
    for path in (tmp_path / "c").rglob("*"):
        assert path.is_dir() or path.suffix in (".json", ".safetensors"), f"{path} may be a pickle"


def test_a_checkpoint_of_the_untrained_model_restores_it(model: str, tmp_path: Path) -> None:
    batch, store = make_rows(2, 2)
    group = start(model, store)
    group.save_checkpoint(str(tmp_path / "c"))
    digest = group.state_digest()
    first = group.update_actor(batch)["actor/pg_loss"]
    group.load_checkpoint(str(tmp_path / "c"))
    assert group.state_digest() == digest
    assert group.update_actor(batch)["actor/pg_loss"] == first
    with pytest.raises(WorkerFailed, match="no finished actor checkpoint"):
        group.load_checkpoint(str(tmp_path / "nothing"))
    group.shutdown()


def test_a_tag_that_contradicts_the_row_is_an_error_that_names_both(model: str) -> None:
    batch, store = make_rows(2, 2)
    batch.tags[2]["response_len"] += 1
    group = start(model, store)
    with pytest.raises(WorkerFailed, match=rf"row {batch.keys[2]}: response_mask has \d+ entries, its tag"):
        group.update_actor(batch)
    group.shutdown()


def test_a_model_directory_without_a_model_is_an_error(tmp_path: Path) -> None:
    group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, settings(str(tmp_path)), MemoryStore({})))
    with pytest.raises(WorkerFailed, match=r"model.path=.*no config.json there"):
        group.init_model()
    group.shutdown()


def test_every_metric_of_the_actor_is_in_the_table_of_metrics(model: str) -> None:
    from streamrl.monitor.registry import check_step_metrics

    batch, store = make_rows(2, 2)
    batch.extra_info = {**(batch.extra_info or {}), "max_age": 2}
    group = start(model, store, bypass=False)
    metrics = group.compute_log_prob(batch) | group.update_actor(batch)
    group.shutdown()
    check_step_metrics(metrics)


def test_weights_that_are_not_finite_are_not_published(model: str, tmp_path: Path) -> None:
    batch, store = make_rows(2, 2)
    group = start(model, store, lr=1e38)
    for _ in range(2):
        group.update_actor(batch)
    with pytest.raises(WorkerFailed, match=r"weights of version 2 are not finite .* has diverged"):
        group.publish_weights(2, str(tmp_path))
    group.shutdown()
