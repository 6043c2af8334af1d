"""Rows into micro-batches and padded arrays; masks, advantages and the learning rate."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.single_controller.dispatch import MINI_BATCH, MINI_BATCHES
from streamrl.workers.batch import MicroBatching, Rows, pad, unflatten
from streamrl.workers.engine import EngineRegistry
from streamrl.workers.engine.schedule import Schedule
from streamrl.workers.preparation import counts, loss_masks, mini_batch_rows, token_advantages


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_micro_batches_hold_each_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    for packed in (False, True):
        batches = MicroBatching(max_tokens=budget).cut(lengths, packed=packed)
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        for batch in batches:
            tokens = [lengths[i] for i in batch]
            assert len(batch) == 1 or (sum(tokens) if packed else len(batch) * max(tokens)) <= budget


def test_padding_points_each_response_token_at_the_place_that_predicts_it() -> None:
    rows = Rows([np.array([5, 6, 7]), np.array([1, 2, 3, 4, 9])], [1, 3])
    padded = pad(rows)
    assert padded.input_ids.tolist() == [[5, 6, 7, 0, 0], [1, 2, 3, 4, 9]]
    assert padded.targets.tolist() == [7, 3, 4, 9]
    assert padded.row.tolist() == [0, 1, 1, 1]
    assert padded.input_ids.ravel()[padded.positions].tolist() == [6, 2, 3, 4]
    assert [row.tolist() for row in unflatten(padded.targets, rows.responses)] == [[7], [3, 4, 9]]


@pytest.mark.parametrize("response", [0, 3])
def test_a_row_needs_a_prompt_and_a_response(response: int) -> None:
    with pytest.raises(ValueError, match=f"3 tokens with {response} response tokens"):
        pad(Rows([np.array([1, 2, 3])], [response]))


def test_loss_mask_drops_old_tokens_and_excluded_rows() -> None:
    masks = [np.array([1, 0, 1]), np.array([1, 1])]
    versions = [np.array([3, -1, 5]), np.array([5, 5])]
    info = {"version": 5, "max_age": 1, "excluded": ["b"]}
    assert [m.tolist() for m in loss_masks(["a", "b"], masks, versions, info)] == [[0, 0, 1], [0, 0]]
    assert [m.tolist() for m in loss_masks(["a", "b"], masks, None, {})] == [[1, 0, 1], [1, 1]]


def test_an_advantage_is_spread_over_the_tokens_that_count() -> None:
    masks = [np.array([1.0, 0.0]), np.array([0.0])]
    found = token_advantages(["a", "b"], masks, {"advantages": {"a": -2.0}})
    assert [a.tolist() for a in found] == [[-2.0, 0.0], [0.0]]
    with pytest.raises(ValueError, match="row a counts"):
        token_advantages(["a"], masks[:1], {"advantages": {"a": float("inf")}})


def test_a_rank_knows_the_mini_batches_in_which_it_has_no_rows() -> None:
    info = {MINI_BATCH: {"a": 2, "b": 0}, MINI_BATCHES: 3}
    batches = mini_batch_rows(["a", "b"], info)
    assert batches == [[1], [], [0]]
    assert counts(["p0_0_0", "p0_1_0"], [np.array([1.0, 1.0]), np.array([0.0])]).tolist() == [2.0, 1.0]
    assert counts([], []).tolist() == [0.0, 0.0]


def test_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    schedule = Schedule(1.0, "cosine", warmup_steps=4, total_steps=24, min_lr_ratio=0.1)
    rates = [schedule.at(step) for step in range(30)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))
    assert rates[23] == rates[29] == pytest.approx(0.1)
    assert Schedule(2.0).at(1000) == 2.0
    assert [Schedule(1.0, total_steps=40, warmup_ratio=0.1).at(step) for step in (0, 3, 9)] == [0.25, 1.0, 1.0]
    with pytest.raises(ValueError, match="total_training_steps"):
        Schedule(1.0, "cosine")


def test_an_unknown_engine_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match="language_model, fsdp2"):
        EngineRegistry.get("language_model", "megatron")
