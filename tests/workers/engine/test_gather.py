"""Full parameters from shards, on two real gloo ranks: uneven rows, fewer rows than ranks, several buckets."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from streamrl.single_controller.worker import RankInfo
from streamrl.workers.engine import gather, process_group
from tests.workers.engine.world import World

SHAPES = [(5, 3), (1, 4), (8,), (2, 2, 2), (7, 1)]


def gathered(rank: RankInfo, bucket: int) -> list[str]:
    """The names of what came back, each compared with what was cut."""
    process_group.join(rank)
    gather.BUCKET_ELEMENTS = bucket
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = {f"p{i}": torch.randn(shape) for i, shape in enumerate(SHAPES)}
    placements = {"p3": Replicate()}
    sharded = [(name, distribute_tensor(t, mesh, [placements.get(name, Shard(0))])) for name, t in whole.items()]
    found = dict(gather.full_parameters([*sharded, ("plain", torch.ones(3))], 2))
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name
    process_group.leave()
    return list(found)


@pytest.mark.parametrize("bucket", [1, 10, 1 << 20])
def test_shards_come_back_as_the_tensors_they_were_cut_from(world: World, bucket: int) -> None:
    assert world.run(2, gathered, bucket) == [[*(f"p{i}" for i in range(len(SHAPES))), "plain"]] * 2
