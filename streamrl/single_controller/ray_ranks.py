"""Ranks as Ray actors, one process each.

    check totals ─► placement group ─► one actor per rank ─► rank 0 opens a rendezvous ─► workers are constructed

Whatever cannot be placed is a PlacementError before any rank exists, never a wait without end. Each rank runs one
torch thread (OMP_NUM_THREADS=1). Ranks on one node find each other through a file and talk over loopback.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Literal, NoReturn

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agent_loop.user_code import told
from streamrl.single_controller.errors import PlacementError, WorkerDied, WorkerFailed, WorkerGroupError, WorkerTimeout
from streamrl.single_controller.pool import ResourcePool, shown
from streamrl.single_controller.rank_actor import RankActor
from streamrl.single_controller.ranks import ONLY, Ranks, Result, classes_of
from streamrl.single_controller.worker import ClassWithInitArgs, RankInfo

log = logging.getLogger(__name__)

PLACEMENT_TIMEOUT = 10.0
"""Seconds for resources that exist to become free: those of a group just closed are reported with a delay."""


class RayRanks(Ranks):
    """Constructing blocks until the workers of all ranks are constructed."""

    def __init__(
        self, pool: ResourcePool, workers: dict[str, ClassWithInitArgs], *, name: str, timeout: float,
        start_timeout: float, env: dict[str, str], rendezvous: Literal["auto", "file", "tcp"], log_dir: str = "",
    ) -> None:  # fmt: skip
        super().__init__(classes_of(workers), pool.world_size, timeout=timeout)
        self.name = name
        self.logs = [""] * self.world_size
        self._running: list[str] = []
        self._start_timeout = start_timeout
        _check_totals(self.name, pool)
        self._placement = _place(self.name, pool)
        self._rendezvous = ""
        self._actors: list[Any] = []
        try:
            self._actors = self._create(pool, env)
            files = [f"{log_dir}/rank-{rank}.log" if log_dir else "" for rank in range(self.world_size)]
            identified = [actor.identify.remote(file) for actor, file in zip(self._actors, files, strict=True)]
            homes = self._get("identify", identified)
            self.pids = [home["pid"] for home in homes]
            self.logs = [home["log"] for home in homes]
            self._watch_deaths()
            self._start(pool, workers, rendezvous)
        except BaseException:
            self._kill()
            raise

    # --- start --------------------------------------------------------------------------------------------------

    def _create(self, pool: ResourcePool, env: dict[str, str]) -> list[Any]:
        variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if len(pool.process_on_nodes) == 1 and sys.platform == "linux":
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        actor_class = ray.remote(concurrency_groups={"watch": 1, "beside": 1})(RankActor)  # type: ignore[call-overload]
        actors = []
        for node, ranks in enumerate(pool.process_on_nodes):
            for _ in range(ranks):
                options: dict[str, Any] = {
                    "num_cpus": pool.cpus_per_rank,
                    "num_gpus": 1 if pool.device == "cuda" else 0,
                    "max_restarts": 0,
                    "runtime_env": {"env_vars": variables | env},
                }
                if self._placement is not None:
                    options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._placement, node)
                actors.append(actor_class.options(**options).remote())
        return actors

    def _start(self, pool: ResourcePool, workers: dict[str, ClassWithInitArgs], rendezvous: str) -> None:
        kind = rendezvous if rendezvous != "auto" else ("file" if len(pool.process_on_nodes) == 1 else "tcp")
        place = ""
        if pool.world_size > 1:
            [place] = self._get("rendezvous", [self._actors[0].open_rendezvous.remote(kind)])
        self._rendezvous = place
        rank, starts = 0, []
        for ranks in pool.process_on_nodes:
            for local_rank in range(ranks):
                # A cuda rank sees one device only (Ray sets CUDA_VISIBLE_DEVICES), so it is always its device 0.
                local = 0 if pool.device == "cuda" else local_rank
                info = RankInfo(rank, pool.world_size, local, pool.device, place, self.timeout)
                starts.append(self._actors[rank].start.remote(workers, info))
                rank += 1
        self._get("__init__", starts)

    def _get(self, method: str, refs: list[Any]) -> list[Any]:
        """Results of the start-up calls, in order of the ranks; together they have the start's time."""
        results, deadline = [], time.monotonic() + self._start_timeout
        for rank, ref in enumerate(refs):
            try:
                results.append(ray.get(ref, timeout=max(0.0, deadline - time.monotonic())))
            except GetTimeoutError as error:
                raise WorkerTimeout(method, [rank], [self.pids[rank]], self._start_timeout) from error
            except RayActorError as error:
                raise self._died(rank, method) from error
            except RayTaskError as error:
                raise WorkerFailed(rank, self.pids[rank], method, told(error.cause)) from error
        return results

    # --- calls ----------------------------------------------------------------------------------------------------

    def submit(
        self, rank: int, role: str, method: str, args: tuple, kwargs: dict[str, Any], *, beside: bool = False
    ) -> Result:
        actor = self._actors[rank]
        future = (actor.run_beside if beside else actor.run).remote(role, method, args, kwargs).future()
        name = method if role == ONLY else f"{role}.{method}"
        self._running.append(name)
        future.add_done_callback(lambda _: self._running.remove(name))
        return future

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def death(self, rank: int, method: str, error: BaseException) -> WorkerDied | None:
        gone = isinstance(error, RayActorError | ActorUnavailableError)
        return self._died(rank, method) if gone else None

    def _died(self, rank: int, method: str) -> WorkerDied:
        return WorkerDied(rank, self.pids[rank], method, self.logs[rank])

    def _watch_deaths(self) -> None:
        """A call that never returns fails when its process ends: a death is an event, nobody polls."""
        self._parked = [actor.until_death.remote().future() for actor in self._actors]
        for rank, parked in enumerate(self._parked):
            parked.add_done_callback(lambda _, rank=rank: self._rank_ended(rank))

    def _rank_ended(self, rank: int) -> None:
        if not self.closing and self.failure is None:
            self.failure = self._died(rank, self._running[-1] if self._running else "")
            log.error("%s: %s", self.name, self.failure)

    async def watch(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future = loop.create_future()
        for parked in self._parked:
            parked.add_done_callback(
                lambda _: (
                    None
                    if loop.is_closed()
                    else loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(None))
                )
            )
        await ended
        raise self.failure or WorkerGroupError(f"{self.name} was closed while it was watched")

    # --- end ------------------------------------------------------------------------------------------------------

    async def end(self) -> None:
        await asyncio.to_thread(self._kill)

    def _kill(self) -> None:
        self.closing = True
        for actor in self._actors:
            ray.kill(actor)
        if self._placement is not None:
            remove_placement_group(self._placement)
        if self._rendezvous.startswith("file://"):  # ours to remove, as the ranks may be dead; only there on one node
            shutil.rmtree(Path(self._rendezvous.removeprefix("file://")).parent, ignore_errors=True)


def _check_totals(name: str, pool: ResourcePool) -> None:
    total = ray.cluster_resources()
    short = {kind: amount for kind, amount in pool.needed.items() if amount > total.get(kind, 0.0)}
    if short:
        raise _placement_error(name, pool, "the cluster has", {kind: total.get(kind, 0.0) for kind in short}, short)


def _place(name: str, pool: ResourcePool) -> PlacementGroup | None:
    """Reserve one bundle per node; None for a pool that takes no resources."""
    if not pool.per_rank:
        return None
    bundles = [{kind: amount * ranks for kind, amount in pool.per_rank.items()} for ranks in pool.process_on_nodes]
    group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK")
    if group.wait(PLACEMENT_TIMEOUT):
        return group
    remove_placement_group(group)
    free = ray.available_resources()
    raise _placement_error(name, pool, "free are", {kind: free.get(kind, 0.0) for kind in pool.needed}, pool.needed)


def _placement_error(
    name: str, pool: ResourcePool, what: str, there: dict[str, float], needed: dict[str, float]
) -> PlacementError:
    nodes = len(pool.process_on_nodes)
    return PlacementError(
        f"{name}: {pool.world_size} ranks on {nodes} node{'s' * (nodes > 1)} need {shown(needed)}; {what} "
        f"{shown(there)}. Start fewer ranks (trainer.n_gpus_per_node), "
        "or tell Ray of more logical CPUs (ray_kwargs.ray_init.num_cpus)"
    )
