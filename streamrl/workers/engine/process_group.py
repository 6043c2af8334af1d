"""Joining the ranks' process group, from a RankInfo. One default group per process, counted by its users."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from streamrl.single_controller.worker import RankInfo

_lock = threading.Lock()
_users = 0
_ours = False
"""Whether the group was made here; one of another library in this process (an inference engine) is left alone."""


def join(rank: RankInfo) -> None:
    """Idempotent per process: several engines of a world of one share its group. `leave` once per `join`."""
    global _users, _ours
    with _lock:
        if dist.is_initialized() and dist.get_world_size() != rank.world_size:
            raise RuntimeError(
                f"this process is in a process group of {dist.get_world_size()} ranks already, not {rank.world_size}; "
                "start the ranks of another group in processes of their own"
            )
        if not dist.is_initialized():
            if rank.device == "cuda":
                torch.cuda.set_device(rank.local_rank)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if rank.device == "cuda" else "gloo",
                store=_store(rank), rank=rank.rank, world_size=rank.world_size, timeout=timedelta(seconds=rank.timeout),
            )  # fmt: skip
            _ours = True
        _users += 1


def leave() -> None:
    """The last user ends the group."""
    global _users, _ours
    with _lock:
        _users -= 1
        if _users == 0 and _ours and dist.is_initialized():
            _ours = False
            dist.destroy_process_group()


def _store(rank: RankInfo) -> Store:
    if rank.world_size == 1:
        return HashStore()
    scheme, _, place = rank.rendezvous.partition("://")
    if scheme == "file":
        return FileStore(place, rank.world_size)
    if scheme == "tcp":
        host, _, port = place.rpartition(":")
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=rank.timeout))
    raise ValueError(
        f"rendezvous {rank.rendezvous!r} is neither file:// nor tcp://, needed for {rank.world_size} ranks"
    )
