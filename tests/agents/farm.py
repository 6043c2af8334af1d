"""A queue, a fake LLM server and agent workers in one virtual-time loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from agent_loop.llm.client import Patience, RoutedClient
from agent_loop.loop import Budgets
from agent_loop.rows import PROMPT_FIELDS
from agent_loop.worker import AgentLoopWorker, WorkerConfig
from tests.agents.fakes import FakeServer, byte_chat, says
from transfer_queue.client import QueueClient
from transfer_queue.local import LocalQueue
from transfer_queue.net.messages import Changes, Group, GroupSpec, TaskSpec

CALL = '<tool_call>{"name": "calculator", "arguments": {"expr": "17*23"}}</tool_call>'
CHAT = byte_chat()
TASKS = [TaskSpec("generate", "prompt", "clock", ttl=15.0), TaskSpec("train", "rows", "incarnation")]

Spans = list[tuple[str, float, float, dict[str, Any]]]


def config(**changes: Any) -> WorkerConfig:
    settings: dict[str, Any] = {
        "model_path": "", "partitions": ("train",), "default_agent_loop": "tool_agent", "reward": "last_integer",
        "tools": {"calculator": {"latency_mean": 0.3}}, "budgets": Budgets(response_length=500), "seed": 1,
    }  # fmt: skip
    return WorkerConfig(**{**settings, **changes})


@dataclass
class Farm:
    queue: LocalQueue
    trainer: QueueClient
    server: FakeServer
    llm: RoutedClient
    tasks: asyncio.TaskGroup
    spans: Spans = field(default_factory=list)
    teacher: RoutedClient | None = None

    def worker(self, name: str = "agent-0", **changes: Any) -> AgentLoopWorker:
        def on_span(span: str, start: float, end: float | None, /, **fields: Any) -> None:
            if end is not None:
                self.spans.append((span, start, end, fields))

        client, chat = self.queue.client(name), changes.pop("chat", CHAT)
        return AgentLoopWorker(
            client, self.llm, config(**changes), name=name, chat=chat, on_span=on_span, teacher=self.teacher
        )

    def start(self, name: str = "agent-0", **changes: Any) -> AgentLoopWorker:
        worker = self.worker(name, **changes)
        self.tasks.create_task(worker.run())
        return worker

    async def admit(
        self, uids: list[str], *, n: int = 2, partition: str = "train", tag: Any = None, **columns: Any
    ) -> None:
        prompt = {
            "raw_prompt": [{"role": "user", "content": "17 * 23 = ?"}], "data_source": "calculator",
            "reward_model": {"ground_truth": "391"}, "extra_info": {"index": 7},
            "agent_name": None, "tools_kwargs": None,
        } | columns  # fmt: skip
        specs = [GroupSpec(uid, n, order, tag=tag or {}) for order, uid in enumerate(uids)]
        await self.trainer.admit(partition, specs, {name: [prompt.get(name)] * len(uids) for name in PROMPT_FIELDS})

    async def settled(self, count: int, *, partition: str = "train", wait: float = 10_000) -> dict[str, Group]:
        """The groups by uid, once `count` of them are neither pending nor generating."""
        seq, known = -1, {}
        async with asyncio.timeout(wait):
            while True:
                changes: Changes = await self.trainer.watch(partition, seq, wait=wait)
                seq = changes.seq
                known |= {group.uid: group for group in changes.groups}
                if sum(group.state not in ("pending", "generating") for group in known.values()) >= count:
                    return known

    async def held(self, partition: str = "train") -> int:
        return (await self.trainer.stats()).partitions[partition].depth.get("generating", 0)


class AtOnce(ThreadPoolExecutor):
    """Runs work in place: a virtual clock would jump to the next timer while a thread is busy."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@asynccontextmanager
async def farm(
    *turns: str, seconds: float = 0.1, server: FakeServer | None = None, poison: int = 100
) -> AsyncIterator[Farm]:
    """Partition "train" is open; workers that still run at the end are ended with it. `poison`: as in `Patience`; every
    prompt here is the same one unless told otherwise, and where servers are killed it dies often by chance."""
    asyncio.get_running_loop().set_default_executor(AtOnce())
    server = server or FakeServer(says(*(turns or (CALL, "= 391"))), seconds=seconds, version=3)
    llm = RoutedClient({"llm-0": server}, patience=Patience(healthy=20.0, poison=poison))
    async with LocalQueue(unit_budget_bytes=64 << 20, segment_bytes=1 << 20) as queue:
        trainer = queue.client("trainer")
        await trainer.open_partition("train", tasks=TASKS)
        async with asyncio.TaskGroup() as tasks:
            made = Farm(queue, trainer, server, llm, tasks)
            yield made
            for task in list(tasks._tasks):
                task.cancel()
        await llm.close()
