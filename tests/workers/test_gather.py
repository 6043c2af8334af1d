"""Full parameters from shards, on two real gloo ranks: uneven rows, fewer rows than ranks, several buckets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from streamrl.workers.engine import gather

SHAPES = [(5, 3), (1, 4), (8,), (2, 2, 2), (7, 1)]


def rank_main(rank: int, rendezvous: str, bucket: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    gather.BUCKET_ELEMENTS = bucket
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = {f"p{i}": torch.randn(shape) for i, shape in enumerate(SHAPES)}
    placements = {"p3": Replicate()}
    sharded = [(name, distribute_tensor(t, mesh, [placements.get(name, Shard(0))])) for name, t in whole.items()]
    found = dict(gather.full_parameters([*sharded, ("plain", torch.ones(3))], 2))
    assert list(found) == [*whole, "plain"]
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name
    dist.destroy_process_group()


@pytest.mark.parametrize("bucket", [1, 10, 1 << 20])
def test_shards_come_back_as_the_tensors_they_were_cut_from(tmp_path: Path, bucket: int) -> None:
    mp.spawn(rank_main, args=(str(tmp_path / "rendezvous"), bucket), nprocs=2)
