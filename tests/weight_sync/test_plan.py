"""From N training ranks to M workers: every number arrives where it belongs, once."""

from __future__ import annotations

import itertools

import pytest
import torch

from streamrl.weight_sync.plan import buckets, lane, pieces, source_box, target_box, tensor_parallel
from streamrl.weight_sync.shares import shares_of

SHAPES = [(), (1,), (5,), (8,), (1, 3), (7, 4), (8, 6), (3, 2, 5), (0, 4), (2, 0)]
CASES = [
    (shape, split, ranks, workers)
    for shape, ranks, workers in itertools.product(SHAPES, range(1, 6), range(1, 5))
    for split in (None, *range(len(shape)))
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_of_a_workers_part_comes_from_exactly_one_rank(shape: tuple[int, ...]) -> None:
    for _, split, ranks, workers in (case for case in CASES if case[0] == shape):
        full = torch.arange(torch.Size(shape).numel()).view(shape or (1,))
        found = list(pieces(shape, split, ranks=ranks, workers=workers))
        for worker in range(workers):
            box = target_box(shape, split, worker, workers)
            mine, times = torch.full([len(r) for r in box], -1), torch.zeros([len(r) for r in box])
            for piece in (piece for piece in found if piece.target == worker):
                outer = source_box(shape, piece.source, ranks)
                held = full[tuple(slice(r.start, r.stop) for r in outer)]
                mine[piece.inside(box)] = held[piece.inside(outer)]
                times[piece.inside(box)] += 1
            assert (times == 1).all()
            assert torch.equal(mine, full[tuple(slice(r.start, r.stop) for r in box)])


@pytest.mark.parametrize("ranks", range(1, 6))
def test_the_shares_of_all_ranks_are_the_tensor(ranks: int) -> None:
    tensors = {str(shape): torch.randn(shape) for shape in SHAPES}
    for name, tensor in tensors.items():
        parts = [next(shares_of([(name, tensor)], rank, ranks)) for rank in range(ranks)]
        assert torch.equal(torch.cat([share.local for share in parts]), tensor.reshape(-1))
        at = 0
        for share in parts:
            assert share.start == at or not share.local.numel()
            at += share.local.numel()


def test_lanes_hold_all_pieces_and_buckets_keep_their_order() -> None:
    shapes = [("model.layers.0.self_attn.q_proj.weight", (8, 6)), ("model.layers.0.mlp.down_proj.weight", (6, 8)),
              ("model.norm.weight", (6,)), ("lm_head.weight", (10, 6))]  # fmt: skip
    everything = [
        lane(shapes, tensor_parallel, source=r, ranks=3, target=t, workers=2) for r in range(3) for t in range(2)
    ]
    assert sum(piece.numbers for part in everything for _, piece in part) == 48 + 48 + 2 * 6 + 60
    for part in everything:
        for limit in (1, 50, 10_000):
            cut = list(buckets(part, lambda name: 4, limit))
            assert [item for bucket in cut for item in bucket] == part
            assert all(len(b) == 1 or sum(p.numbers * 4 for _, p in b) <= limit for b in cut)


def test_a_decoders_layers_are_split_as_tensor_parallel_servers_do() -> None:
    assert [tensor_parallel(f"model.layers.3.{name}") for name in (
        "self_attn.k_proj.weight", "self_attn.k_proj.bias", "self_attn.o_proj.weight", "mlp.up_proj.weight",
        "mlp.down_proj.weight", "input_layernorm.weight")] == [0, 0, 1, 0, 1, None]  # fmt: skip
    with pytest.raises(ValueError, match="no dimension 1"):
        target_box((4,), 1, 0, 2)
