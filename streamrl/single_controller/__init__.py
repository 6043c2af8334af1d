"""The single controller: one program calls methods on many worker processes as if they were one object.

    group = RayWorkerGroup(ResourcePool([2]), ClassWithInitArgs(ActorWorker, ...))
    metrics = await group.update_actor(batch)          # split by rank, run on all, merged

    views = RayWorkerGroup(pool, {"actor": ..., "critic": ...}).spawn()      # several roles in each process

A worker marks its methods with `@register(dispatch_mode=...)`; the group splits the arguments, runs the method on the
ranks under a deadline, notices a rank's death by name, and collects. `LocalWorkerGroup` is the same in one process.
Nothing here imports torch; Ray is imported when `RayWorkerGroup` is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamrl.single_controller.decorator import (
    Dispatch,
    Execute,
    MeshDispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from streamrl.single_controller.errors import (
    MeshError,
    PlacementError,
    WorkerDied,
    WorkerFailed,
    WorkerGroupError,
    WorkerTimeout,
)
from streamrl.single_controller.local_group import LocalWorkerGroup
from streamrl.single_controller.metrics import (
    Correlation,
    Effective,
    Low,
    Mean,
    Metric,
    Peak,
    Spread,
    Total,
    merge_metrics,
)
from streamrl.single_controller.pool import ResourcePool
from streamrl.single_controller.ranks import create_colocated_worker_cls
from streamrl.single_controller.roles import ResourcePoolManager, Role
from streamrl.single_controller.worker import ClassWithInitArgs, RankInfo, RayClassWithInitArgs, Worker
from streamrl.single_controller.worker_group import Call, WorkerGroup

if TYPE_CHECKING:
    from streamrl.single_controller.ray_group import RayWorkerGroup

__all__ = [
    "Call", "ClassWithInitArgs", "Correlation", "Dispatch", "Effective", "Execute", "LocalWorkerGroup", "Low", "Mean",
    "MeshDispatch", "MeshError", "Metric", "Peak", "PlacementError", "RankInfo", "RayClassWithInitArgs",
    "RayWorkerGroup",
    "ResourcePool", "ResourcePoolManager", "Role", "Spread", "Total", "Worker", "WorkerDied", "WorkerFailed",
    "WorkerGroup", "WorkerGroupError", "WorkerTimeout", "create_colocated_worker_cls",
    "make_nd_compute_dataproto_dispatch_fn", "merge_metrics", "register",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "RayWorkerGroup":
        from streamrl.single_controller.ray_group import RayWorkerGroup

        return RayWorkerGroup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
