"""The stage `compute_rm_scores` on a rank: from the tokens in the queue to the column and the scores that it tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config.sections.reward_model import RewardModelConfig
from streamrl.monitor.registry import check_step_metrics
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup, WorkerFailed
from streamrl.single_controller.data_proto import DataProto
from streamrl.single_controller.metrics import merge_metrics
from streamrl.workers.actor import ActorWorker
from streamrl.workers.row_store import NoRows
from tests.workers.tiny import VOCAB, make_model, make_rows, settings
from transfer_queue.metadata import KVBatchMeta


def make_scorer(directory: Path, **weights: float) -> str:
    """A random reward model; its directory. `weights` are put into its head."""
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(5)
    model = Qwen2ForSequenceClassification(
        Qwen2Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, num_labels=1,
        )
    )  # fmt: skip
    torch.nn.init.normal_(model.score.weight)
    for value in weights.values():
        torch.nn.init.constant_(model.score.weight, value)
    model.save_pretrained(directory)
    return str(directory)


def start(directory: Path, store: Any, **weights: float) -> LocalWorkerGroup:
    chosen = RewardModelConfig(enable=True, model_path=make_scorer(directory / "scorer", **weights))
    options = replace(settings(make_model(directory / "model")), reward_model=chosen)
    group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, options, store))
    group.init_model()
    return group


def expected(directory: Path, rows: list[np.ndarray]) -> list[float]:
    import torch
    from transformers import AutoModelForSequenceClassification

    scorer = AutoModelForSequenceClassification.from_pretrained(directory / "scorer", dtype=torch.float32)
    with torch.no_grad():
        return [scorer(input_ids=torch.from_numpy(ids)[None]).logits.item() for ids in rows]


def test_a_score_stands_on_the_last_sampled_token_and_comes_back_with_its_cost(tmp_path: Path) -> None:
    batch, store = make_rows(2, 3)
    store.columns["response_mask"]["p0_0_0"][-2:] = 0  # it ends with what a tool said
    group = start(tmp_path, store)
    parts = group.compute_rm_scores(batch)
    group.shutdown()
    told = {key: score for part in parts for key, score in part["scores"].items()}
    scores = expected(tmp_path, [store.columns["input_ids"][key] for key in batch.keys])
    assert [told[key] for key in batch.keys] == pytest.approx(scores, abs=1e-5)
    for key in batch.keys:
        column, sampled = store.columns["rm_scores"][key], np.flatnonzero(store.columns["response_mask"][key])
        assert column.dtype == np.float32
        assert (column[sampled[-1]], np.count_nonzero(column)) == (np.float32(told[key]), 1)
    metrics = merge_metrics(part["metrics"] for part in parts)
    check_step_metrics(metrics)
    tokens = sum(tag["response_len"] for tag in batch.tags)
    assert metrics["data/bytes_written"] == 4 * tokens
    assert metrics["data/bytes_read"] == 8 * (tokens + sum(tag["seq_len"] for tag in batch.tags))
    assert store.reads == [["input_ids", "response_mask"]]


def test_an_empty_share_takes_part(tmp_path: Path) -> None:
    _, store = make_rows(1, 2)
    group = start(tmp_path, store)
    assert [part["scores"] for part in group.compute_rm_scores(KVBatchMeta([], [], "train"))] == [{}]
    group.shutdown()


def test_scores_that_are_not_finite_are_told_with_the_row_and_not_written(tmp_path: Path) -> None:
    batch, store = make_rows(1, 2)
    group = start(tmp_path, store, broken=float("nan"))
    with pytest.raises(WorkerFailed, match="the reward model gives scores that are not finite, first in row p0_0_0"):
        group.compute_rm_scores(batch)
    group.shutdown()
    assert "rm_scores" not in store.columns


def test_an_actor_without_one_says_which_setting_is_missing(tmp_path: Path) -> None:
    batch, store = make_rows(1, 2)
    group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, settings(make_model(tmp_path)), store))
    group.init_model()
    with pytest.raises(WorkerFailed, match=r"reward\.reward_model\.enable"):
        group.compute_rm_scores(batch)
    group.shutdown()


def test_rows_that_the_caller_holds_are_scored_as_well(tmp_path: Path) -> None:
    import torch

    rng = np.random.default_rng(1)
    ids = rng.integers(0, VOCAB, (4, 12))
    mask = np.ones((4, 12), np.int64)
    mask[1, -3:] = mask[2, :2] = 0
    group = start(tmp_path, NoRows())
    data = DataProto.from_dict(
        {name: torch.from_numpy(values) for name, values in
         {"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, 4:]}.items()}
    )  # fmt: skip
    found = group.compute_rm_scores(data)
    group.shutdown()
    assert found.batch is not None
    scores = expected(tmp_path, [row[kept > 0] for row, kept in zip(ids, mask, strict=True)])
    np.testing.assert_allclose(found.batch["rm_scores"].sum(-1).numpy(), scores, atol=1e-5)
