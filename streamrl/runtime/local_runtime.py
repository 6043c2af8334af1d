"""The parts of a run in one process and one event loop: for a debugger, for tests, and on a virtual clock.

The same loop, queue, agents and engines as under Ray; only the shells are missing. With `rollout.name=sim`,
`actor.strategy=sim` and `rollout.sim.clock=virtual` nothing takes real time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agent_loop.llm.answers import Sense
from agent_loop.llm.awake import AwakeTime
from agent_loop.llm.client import Patience, RoutedClient
from agent_loop.manager import AgentLoopManager, TaskSpawner
from agent_loop.rendering.chat import ChatTokenizer
from agent_loop.worker import AgentLoopWorker
from streamrl.config import StreamRLConfig
from streamrl.data import train_dataset, val_dataset
from streamrl.monitor.events import EventLog
from streamrl.monitor.heartbeat import heartbeat
from streamrl.recording.record import open_recording
from streamrl.recording.replay import NoServers, ReplayAgents
from streamrl.rollout.building import build_server
from streamrl.rollout.manager import LLMServerManager
from streamrl.runtime import settings
from streamrl.runtime.failures import queue_failed
from streamrl.runtime.preflight import check_remote_teacher
from streamrl.runtime.run_dir import RunDirectory
from streamrl.single_controller import ClassWithInitArgs, LocalWorkerGroup
from streamrl.trainer.parts import Agents, Parts, Servers
from streamrl.weight_sync.leftovers import weights_home
from transfer_queue.client import QueueClient
from transfer_queue.errors import QueueError
from transfer_queue.local import LocalQueue
from transfer_queue.storage.place import choose_spill


@asynccontextmanager
async def local_parts(config: StreamRLConfig, run: RunDirectory) -> AsyncIterator[Parts]:
    """Everything started in the running loop, on the loop's clock."""
    clock = asyncio.get_running_loop().time if is_virtual(config) else time.monotonic
    async with AsyncExitStack() as stack:
        events = stack.enter_context(EventLog(run.path / "events", "trainer", clock=clock))
        stack.enter_context(heartbeat(events))
        events.state("run", "starting")
        await check_remote_teacher(config)
        train_data, val_data = train_dataset(config), val_dataset(config)
        stack.enter_context(weights_home(settings.weights_dir(run), run.path))
        weights = settings.sync_dir(config, run)
        local = await stack.enter_async_context(_start_queue(config, run))
        queue = local.client("trainer")
        recording = open_recording(config)
        group = _start_ranks(config, run, local)
        stack.push_async_callback(group.close)
        roles = group.spawn()
        for view in roles.values():
            await view.init_model()
        events.state("part", "the training rank has the model")
        if recording:
            servers, agents, teachers = NoServers(), ReplayAgents(queue, recording), None
        else:
            teachers = _start_teachers(config, run, events, stack)
            servers, agents = _start_rollout(config, run, local, events, stack, teachers)
        if isinstance(servers, LLMServerManager) and hasattr(actor := roles["actor"], "send_weights"):
            servers.broadcast_by(actor.send_weights)
        yield Parts(
            config=config, run=run, queue=queue,
            actor=roles["actor"],  # type: ignore[arg-type]  # its methods are those that ActorWorker registers
            critic=roles.get("critic"),  # type: ignore[arg-type]
            servers=servers, agents=agents, train_data=train_data, val_data=None if recording else val_data,
            events=events, clock=clock, weights_dir=weights, recording=recording, teachers=teachers,
        )  # fmt: skip


def _start_teachers(
    config: StreamRLConfig, run: RunDirectory, events: EventLog, stack: AsyncExitStack
) -> LLMServerManager | None:
    servers = {name: build_server(one, events) for name, one in settings.teacher_servers(config, run).items()}
    for server in servers.values():
        stack.push_async_callback(server.close)
    return LLMServerManager(servers) if servers else None


def _start_rollout(
    config: StreamRLConfig, run: RunDirectory, local: LocalQueue, events: EventLog, stack: AsyncExitStack,
    teachers: LLMServerManager | None,
) -> tuple[Servers, Agents]:  # fmt: skip
    servers = {
        f"server-{i}": build_server(settings.rollout_server(config, run, i), events) for i in range(_replicas(config))
    }
    for server in servers.values():
        stack.push_async_callback(server.close)
    worker_config = settings.agent_worker(config, virtual_clock=is_virtual(config))
    chat = ChatTokenizer.from_pretrained(worker_config.model_path, worker_config.template_kwargs)

    awake, sense = AwakeTime(), Sense(worker_config.vocab_size)

    async def make(name: str) -> AgentLoopWorker:
        patience = Patience(answer=worker_config.answer_timeout)
        llm = RoutedClient(servers, patience=patience, awake=awake, sense=sense)
        stack.push_async_callback(llm.close)
        teacher = RoutedClient(teachers.servers) if teachers else None
        if teacher:
            stack.push_async_callback(teacher.close)
        return AgentLoopWorker(
            local.client(name), llm, worker_config, name=name, chat=chat, on_span=events.span_at, teacher=teacher,
            awake=awake,
        )  # fmt: skip

    workers = config.actor_rollout_ref.rollout.agent.num_workers
    manager = LLMServerManager(servers, settings.sync_policy(config))
    manager.on_turn, manager.on_newest = awake.tell, sense.tell_newest
    return manager, AgentLoopManager(TaskSpawner(make), local.client("manager"), workers)


def is_virtual(config: StreamRLConfig) -> bool:
    return config.actor_rollout_ref.rollout.is_virtual


def _replicas(config: StreamRLConfig) -> int:
    return config.actor_rollout_ref.rollout.num_replicas


def _start_queue(config: StreamRLConfig, run: RunDirectory) -> LocalQueue:
    """Raises UserError for a journal that is damaged, or whatever else keeps it from starting."""
    queue = config.transfer_queue
    units = queue.backend.SimpleStorage.num_data_storage_units
    budget = units * queue.unit_budget_bytes
    disk = None if queue.spill_budget_bytes is None else units * queue.spill_budget_bytes
    try:
        disk = choose_spill(run.queue, queue.spill_dir, 1, budget, disk)
        place = run.queue if queue.spill_dir is None else Path(queue.spill_dir, run.path.name)
        return LocalQueue(
            directory=run.queue, storage_dir=queue.storage_dir, segment_bytes=queue.segment_bytes,
            unit_budget_bytes=budget, spill_dir=place / "spill" if disk else None, spill_budget_bytes=disk,
        )  # fmt: skip
    except QueueError as error:
        raise queue_failed(error) from error


def _start_ranks(config: StreamRLConfig, run: RunDirectory, queue: LocalQueue) -> LocalWorkerGroup:
    if config.actor_rollout_ref.actor.strategy == "sim":
        actor = _sim_actor(config, queue.client("actor-0"))
        return LocalWorkerGroup({"actor": actor}, inline=True)  # its methods only sleep, on this loop's clock
    from streamrl.workers.row_store import LoopStore

    loop = asyncio.get_running_loop()
    queues = {role: LoopStore(queue.client(f"{role}-0"), loop) for role in ("actor", "critic")}
    return LocalWorkerGroup(settings.rank_workers(config, run, queues), device=config.trainer.device)


def _sim_actor(config: StreamRLConfig, client: QueueClient) -> ClassWithInitArgs:
    from streamrl.workers.sim_actor import SimActorWorker, SimTiming

    times = config.actor_rollout_ref.actor.sim
    timing = SimTiming(times.step_seconds, times.token_seconds, times.publish_seconds, times.save_seconds)
    model = config.actor_rollout_ref.model
    return ClassWithInitArgs(SimActorWorker, timing, queue=client, tokenizer_path=model.tokenizer_path or model.path)
