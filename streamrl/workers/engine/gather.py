"""Sharded parameters as full tensors: many small ones in one collective, since each costs a round between the ranks.

rank r holds rows [r·c, (r+1)·c) of a parameter, c = ceil(rows / ranks); the last ranks may hold fewer, or none
buckets of parameters ──flatten, pad──► one all_gather ──cut, join──► full tensors, on every rank
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

BUCKET_ELEMENTS = 16 << 20
"""Of one collective, per rank: 64 MiB in float32."""

Named = tuple[str, torch.Tensor]


def full_parameters(named: Iterable[Named], world_size: int) -> Iterator[Named]:
    """All parameters, detached, in their order. Collective: every rank has to take the same ones."""
    bucket: list[Named] = []
    size = 0
    for name, parameter in named:
        if isinstance(parameter, DTensor) and not _sharded_by_rows(parameter):
            yield from _gathered(bucket, world_size)
            bucket, size = [], 0
            yield name, parameter.full_tensor().detach()
            continue
        if bucket and (size >= BUCKET_ELEMENTS or parameter.dtype != bucket[0][1].dtype):
            yield from _gathered(bucket, world_size)
            bucket, size = [], 0
        bucket.append((name, parameter.detach()))
        size += parameter.numel() // world_size
    yield from _gathered(bucket, world_size)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """What lies on this rank, detached; writing to it writes to the parameter."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _sharded_by_rows(parameter: DTensor) -> bool:
    return len(parameter.placements) == 1 and parameter.placements[0] == Shard(0) and parameter.ndim > 0


def _gathered(bucket: list[Named], world_size: int) -> Iterator[Named]:
    sharded = [tensor for _, tensor in bucket if isinstance(tensor, DTensor)]
    if not sharded or world_size == 1:
        for name, tensor in bucket:
            yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return
    parts = [_padded(tensor, world_size) for tensor in sharded]
    mine = torch.cat(parts)
    everyones = mine.new_empty(world_size * len(mine))
    dist.all_gather_into_tensor(everyones, mine)
    columns = iter(everyones.view(world_size, -1).split([len(part) for part in parts], dim=1))
    for name, tensor in bucket:
        if isinstance(tensor, DTensor):
            yield name, next(columns).reshape(-1)[: tensor.numel()].view(tensor.shape)
        else:
            yield name, tensor


def _padded(parameter: DTensor, world_size: int) -> torch.Tensor:
    """This rank's rows, flat, filled up to the size that the first rank has."""
    rows = -(-parameter.shape[0] // world_size)
    local = parameter.to_local().reshape(-1)
    return torch.nn.functional.pad(local, (0, rows * math.prod(parameter.shape[1:]) - len(local)))
