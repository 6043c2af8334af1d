"""The parts of a run as Ray actors and the processes under them.

    RayQueue ── controller, storage units          RayLLMServer × num_replicas, and as many as the teacher has
    AgentWorkerActor × agent.num_workers           RankActor × training ranks

Service actors reserve no logical CPUs, so nothing hangs for want of one; the training ranks do, and what cannot be
placed is an error at start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from agent_loop.manager import AgentLoopManager
from streamrl.config import StreamRLConfig
from streamrl.data import train_dataset, val_dataset
from streamrl.monitor.events import EventLog
from streamrl.monitor.heartbeat import heartbeat
from streamrl.recording.record import Recording, open_recording
from streamrl.recording.replay import NoServers, ReplayAgents
from streamrl.rollout.fleet import Fleet
from streamrl.rollout.fleet_api import FleetApi
from streamrl.rollout.manager import LLMServerManager
from streamrl.rollout.replica import RayServerHandle, start_ray_servers
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.runtime import settings
from streamrl.runtime.agent_actors import RaySpawner
from streamrl.runtime.failures import queue_failed
from streamrl.runtime.preflight import check_remote_teacher
from streamrl.runtime.run_dir import LOGS, RunDirectory
from streamrl.runtime.servers import ENDPOINT_FILE, KEY_FILE
from streamrl.single_controller import RayWorkerGroup, Role
from streamrl.single_controller.roles import nodes_of_ray
from streamrl.trainer.parts import Agents, Parts, Servers
from streamrl.weight_sync.leftovers import weights_home
from transfer_queue.client import QueueClient
from transfer_queue.cluster import RayQueue
from transfer_queue.errors import QueueError

log = logging.getLogger(__name__)
T = TypeVar("T")


@asynccontextmanager
async def ray_parts(config: StreamRLConfig, run: RunDirectory) -> AsyncIterator[Parts]:
    """Everything started and connected; stopped again when the block is left. Ray must be initialised."""
    async with AsyncExitStack() as stack:
        events = stack.enter_context(EventLog(run.path / "events", "trainer"))
        stack.enter_context(heartbeat(events))
        events.state("run", "starting")
        await check_remote_teacher(config)
        train_data, val_data = train_dataset(config), val_dataset(config)
        stack.enter_context(weights_home(settings.weights_dir(run), run.path))
        weights = settings.sync_dir(config, run)
        address = await _start_queue(config, run, stack)
        events.state("part", "the queue stands")
        queue = await QueueClient.connect(address, name="trainer")
        stack.push_async_callback(queue.close)
        recording = open_recording(config)
        group, (servers, agents, teachers) = await asyncio.gather(
            _told(asyncio.to_thread(_start_ranks, config, run, address), events, "the training ranks have the model"),
            _replayed(recording, queue) if recording else _start_rollout(config, run, address, queue, events, stack),
        )
        stack.push_async_callback(group.close)
        roles = group.spawn()
        if isinstance(servers, LLMServerManager) and hasattr(actor := roles["actor"], "send_weights"):
            servers.broadcast_by(actor.send_weights)
        yield Parts(
            config=config, run=run, queue=queue,
            actor=roles["actor"],  # type: ignore[arg-type]  # its methods are those that ActorWorker registers
            critic=roles.get("critic"),  # type: ignore[arg-type]
            servers=servers, agents=agents, train_data=train_data, val_data=None if recording else val_data,
            events=events, clock=time.monotonic, weights_dir=weights, recording=recording, teachers=teachers,
        )  # fmt: skip


async def _told(work: Awaitable[T], events: EventLog, what: str) -> T:
    """Its result, once the start was told that it is there."""
    result = await work
    events.state("part", what)
    return result


async def _start_queue(config: StreamRLConfig, run: RunDirectory, stack: AsyncExitStack) -> dict[str, str]:
    options = config.transfer_queue
    queue = RayQueue(
        run.queue,
        storage_dir=options.storage_dir,
        units_per_node=options.backend.SimpleStorage.num_data_storage_units,
        unit_budget_bytes=options.unit_budget_bytes,
        spill_dir=options.spill_dir,
        spill_budget_bytes=options.spill_budget_bytes,
        segment_bytes=options.segment_bytes,
    )
    try:
        address = await queue.astart()
    except QueueError as error:  # Ray's error for it is one, too
        raise queue_failed(error) from error

    async def stop(kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await queue.astop(clean=run.finished)

    stack.push_async_exit(stop)  # type: ignore[arg-type]
    return address


def _start_ranks(config: StreamRLConfig, run: RunDirectory, address: dict[str, str]) -> RayWorkerGroup:
    """One process per rank, in it the actor (with its reference) and, if there is one, the critic."""
    pools = settings.resource_pools(config)
    pools.check(nodes_of_ray())
    pool = pools.get_resource_pool(Role.ActorRolloutRef)
    workers = settings.rank_workers(config, run, {"actor": address, "critic": address})
    group = RayWorkerGroup(
        pool, workers, name="ranks", start_timeout=config.trainer.start_timeout, log_dir=str(run.path / LOGS)
    )
    for view in group.spawn().values():
        view.init_model()
    return group


async def _replayed(recording: Recording, queue: QueueClient) -> tuple[Servers, Agents, None]:
    return NoServers(), ReplayAgents(queue, recording), None


async def _start_rollout(
    config: StreamRLConfig, run: RunDirectory, address: dict[str, str], queue: QueueClient, events: EventLog,
    stack: AsyncExitStack,
) -> tuple[Servers, Agents, Servers | None]:  # fmt: skip
    rollout = config.actor_rollout_ref.rollout
    served = {f"server-{i}": settings.rollout_server(config, run, i) for i in range(rollout.num_replicas)}
    servers, teachers = await asyncio.gather(
        _told(_start_servers(served, stack), events, "the LLM servers have the model"),
        _start_servers(settings.teacher_servers(config, run), stack),
    )
    manager = LLMServerManager(servers, settings.sync_policy(config))
    spawner = RaySpawner(settings.agent_worker(config), address, manager.servers, teachers, run.path)

    def restarted(name: str, reason: str) -> None:
        events.state("restart", f"{name}: {reason}", role="agent")

    agents = AgentLoopManager(spawner, queue, rollout.agent.num_workers, on_restart=restarted)
    await stack.enter_async_context(_fleet(config, run, manager, agents, events))
    return manager, agents, LLMServerManager(teachers) if teachers else None


@asynccontextmanager
async def _fleet(
    config: StreamRLConfig, run: RunDirectory, manager: LLMServerManager, agents: AgentLoopManager, events: EventLog
) -> AsyncIterator[None]:
    """The fleet beats, and can be asked (`streamrl servers`)."""
    first, rollout = set(manager.servers), config.actor_rollout_ref.rollout

    async def start(name: str) -> RayServerHandle:
        number = name.rpartition("-")[2]
        replica = int(number) if number.isdigit() else len(manager.servers)
        return (await start_ray_servers({name: settings.rollout_server(config, run, replica)}))[name]

    fleet = Fleet(manager, lambda: agents.workers, start=start)
    fleet.on_service = lambda server, what: events.state("service", what, server=server)
    api = FleetApi(
        fleet,
        run.path / KEY_FILE,
        run.path / ENDPOINT_FILE,
        start_seconds=rollout.start_timeout,
        update_seconds=2 * rollout.weight_sync.timeout,
    )
    beating = asyncio.create_task(fleet.run(), name="fleet")
    beating.add_done_callback(_note_fault)
    try:
        yield
    finally:
        beating.cancel()
        await api.close()
        await asyncio.gather(beating, return_exceptions=True)
        added = [server for name, server in manager.servers.items() if name not in first]
        await asyncio.gather(*(server.close() for server in added))


def _note_fault(task: asyncio.Task[None]) -> None:
    """Without beats the agent workers go on with what they know; the run need not end."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the fleet of LLM servers is looked after no more", exc_info=error)


async def _start_servers(configs: dict[str, RolloutServerConfig], stack: AsyncExitStack) -> dict[str, RayServerHandle]:
    servers = await start_ray_servers(configs)
    for server in servers.values():
        stack.push_async_callback(server.close)
    return servers
