"""Whether new weights can travel as they are told to: where ranks and servers are, and what the servers can read."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.config.root import StreamRLConfig

KEY = "actor_rollout_ref.rollout.weight_sync"


def weight_sync(config: StreamRLConfig) -> Iterator[str]:
    rollout, nodes = config.actor_rollout_ref.rollout, config.trainer.nnodes
    sync, server = rollout.weight_sync, rollout.name
    if sync.backend == "shm" and nodes > 1:
        yield (
            f"{KEY}.backend=shm needs ranks and servers on one node, trainer.nnodes={nodes}; set auto, collective or "
            "disk, whose directory all nodes share"
        )
    if sync.path is not None and sync.backend in ("shm", "collective"):
        yield f"{KEY}.path does nothing with backend={sync.backend}; remove it, or set backend=disk or delta"
    if sync.backend in ("delta", "collective") and server not in ("torch", "sim"):
        yield f"{KEY}.backend={sync.backend}: rollout.name={server} reads full versions; set shm or disk, or name=torch"
    if sync.backend in ("delta", "collective") and config.trainer.deterministic:
        yield (
            f"{KEY}.backend={sync.backend} with trainer.deterministic=true: servers load older versions by name, as "
            "files; set shm or disk"
        )
