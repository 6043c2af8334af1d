"""Attention of packed rows against each row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.workers.batch import MicroBatching, Rows, pack, pad
from streamrl.workers.engine.attention import Packing, packed_attention

CPU = torch.device("cpu")


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """f[H, L, D] each, written out -> f[L, H, D]."""
    key, value = (t.repeat_interleave(len(query) // len(t), 0) for t in (key, value))
    length = query.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    scores = (query @ key.transpose(1, 2) * 0.3).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(0, 1)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=9), st.sampled_from([1, 2, 4]), st.sampled_from([None, 3]),
    st.integers(0, 1000),
)  # fmt: skip
def test_each_row_attends_to_itself_alone(lengths: list[int], kv: int, window: int | None, seed: int) -> None:
    torch.manual_seed(seed)
    tokens = sum(lengths)
    q, k, v = (torch.randn(1, heads, tokens, 8, dtype=torch.float64, requires_grad=True) for heads in (4, kv, kv))
    packing = Packing.of(tuple(lengths), CPU)
    found, _ = packed_attention(torch.nn.Identity(), q, k, v, None, packing=packing, scaling=0.3, sliding_window=window)
    rows = zip(*(t[0].split(lengths, 1) for t in (q, k, v)), strict=True)
    expected = torch.cat([alone(a, b, c, window) for a, b, c in rows])[None]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((found * weights).sum(), (q, k, v)),
        torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_bunches_pad_less_than_a_third_and_only_for_attention() -> None:
    lengths = (100, 90, 80, 75, 74, 60, 10, 9)
    bunches = Packing.of(lengths, CPU).bunches
    assert [bunch.rows for bunch in bunches] == [4, 2, 2]
    assert sum(bunch.rows * bunch.width for bunch in bunches) < sum(lengths) / 0.75


@pytest.mark.parametrize(("options", "name"), [({"softcap": 30.0}, "softcap"), ({"packing": None}, "rows")])
def test_attention_that_cannot_be_packed_says_what_to_set(options: dict[str, Any], name: str) -> None:
    tensor = torch.zeros(1, 1, 2, 4)
    chosen: dict[str, Any] = {"packing": Packing.of((2,), CPU)} | options
    with pytest.raises(ValueError, match=f"no {name}; set use_remove_padding=false"):
        packed_attention(torch.nn.Identity(), tensor, tensor, tensor, None, **chosen)


def test_packed_and_padded_rows_point_at_the_same_tokens() -> None:
    rng = np.random.default_rng(0)
    lengths = [7, 2, 5]
    rows = Rows([rng.integers(0, 50, n) for n in lengths], [3, 1, 4])
    packed, padded = pack(rows, multiple=4), pad(rows)
    assert packed.input_ids.shape == packed.position_ids.shape == (1, 16)
    assert packed.lengths == (7, 2, 5, 2)
    assert np.array_equal(packed.targets, padded.targets)
    assert np.array_equal(packed.row, padded.row)
    assert np.array_equal(packed.input_ids[0][packed.positions], padded.input_ids.ravel()[padded.positions])
    assert np.array_equal(packed.position_ids[0][:9], [0, 1, 2, 3, 4, 5, 6, 0, 1])


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 120), st.integers(0, 5), st.booleans())
def test_rows_are_spread_over_as_many_micro_batches_as_asked_for(
    lengths: list[int], budget: int, more: int, packed: bool
) -> None:
    micro = MicroBatching(max_tokens=budget)
    count = len(micro.cut(lengths, packed=packed)) + more
    batches = micro.spread(lengths, count, packed=packed)
    assert len(batches) == count
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        sizes = [lengths[i] for i in batch]
        assert len(batch) <= 1 or (sum(sizes) if packed else len(batch) * max(sizes)) <= budget


def test_micro_batches_by_rows_hold_at_most_so_many() -> None:
    assert [len(b) for b in MicroBatching(max_rows=3).cut([5] * 8, packed=True)] == [3, 3, 2]
    assert len(MicroBatching().cut([5] * 8, packed=False)) == 1
    with pytest.raises(ValueError, match="max_rows=0"):
        MicroBatching(max_rows=0)
