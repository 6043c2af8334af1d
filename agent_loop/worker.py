"""An agent worker: leases prompt groups, runs their sessions, streams the rows to the queue.

    queue ─lease─► GroupRun ─► sessions (agent loop ◄─► LLM client, tools; reward) ─put + close─► queue

Consumes: task "generate" of its partitions. Produces: rows and session ends. Waits for: room for another session, a
grant. Woken by: a session's end, the queue. It is a plain object in one event loop; a Ray actor, a task or a process
may be around it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agent_loop.group import GroupRun
from agent_loop.llm.awake import AwakeTime
from agent_loop.llm.fleet import FleetNews
from agent_loop.llm.metered import LLMPool
from agent_loop.llm.protocol import SamplingParams, Scorer
from agent_loop.llm.remote_model import RemoteModel
from agent_loop.loop import AGENT_LOOPS, AgentLoop, Budgets, SpanSink, load_agent_loop, no_spans
from agent_loop.plugins import PluginError
from agent_loop.rendering.chat import ChatTokenizer
from agent_loop.rendering.images import ImageRenderer, has_processor
from agent_loop.rewards import RewardFunction
from agent_loop.session import SessionRunner
from agent_loop.teacher import Teacher
from agent_loop.tools.base import Tool, load_tool
from transfer_queue.client import QueueClient
from transfer_queue.errors import DeadlineExceeded, Disconnected

logger = logging.getLogger(__name__)

TASK = "generate"

RETRY_PAUSE = 0.5
"""Seconds before a queue that could not be reached is asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Plain values only, so that it can be sent to another process."""

    model_path: str
    """Directory with the tokenizer, the chat template and, of a model for images, the processor."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, as enable_thinking."""
    vocab_size: int | None = None
    """Of the model: no LLM server may answer a token beyond; None: not known."""
    partitions: tuple[str, ...] = ("train", "val")
    max_sessions: int = 64
    """Sessions that run at the same time."""
    default_agent_loop: str = "single_turn_agent"
    """A registered name or `path.py:Class`; a row's `agent_name` goes first."""
    agent_loops: Mapping[str, str] = field(default_factory=dict)
    """Further names that rows may use, and what they stand for."""
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Registered name or `path.py:Class` → its settings."""
    reward: str = ""
    """A registered name or `path.py:function`; "" if the agent loops score by themselves."""
    scored_later: bool = False
    """The score that counts comes from elsewhere, after rows are put: sessions may end without one."""
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reward_timeout: float = 60.0
    reward_threads: bool = True
    judge: RemoteModel | None = None
    """For a reward function that asks for one."""
    teacher: RemoteModel | None = None
    """Scores the rows, where no servers of the run do."""
    reward_components: tuple[str, ...] = ()
    """Of what rewards return beside "score": the numbers that the trainer is told."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=1))
    """Defaults of all groups; `max_tokens` and `seed` are set per turn."""
    budgets: Budgets = field(default_factory=Budgets)
    seed: int = 0
    seeded: bool = True
    """Whether engines get a seed per turn, derived from (seed, uid, session, turn)."""
    session_timeout: float = 3600.0
    answer_timeout: float = 600.0
    """Seconds without an answer after which an LLM server counts as dead, without those in which it sleeps."""
    lease_wait: float = 30.0
    """Seconds that one lease request waits in the queue."""
    queue_patience: float = 120.0
    """Seconds without any answer of the queue after which the worker gives up."""


class AgentLoopWorker:
    """Invariants: at most `max_sessions` sessions run; a group is leased only while fewer than that are leased and have
    not ended; when `run` has ended, none of its leases is held."""

    def __init__(
        self,
        queue: QueueClient,
        llm: LLMPool,
        config: WorkerConfig,
        *,
        name: str,
        chat: ChatTokenizer | None = None,
        on_span: SpanSink = no_spans,
        teacher: Scorer | None = None,
        awake: AwakeTime | None = None,
    ) -> None:
        """`teacher`: scores the rows of partition "train" before they are put. `awake`: by which the time limits of
        sessions stand still. Raises PluginError, RewardError, RenderingError or KeyMissing for what the config names
        and cannot be had."""
        self.name = name
        self.counts: Counter[str] = Counter()
        self._returned: deque[str] = deque(maxlen=1)
        """Totals since the start: sessions_finished, sessions_failed, sessions_interrupted, rows, groups_closed,
        groups_lost, groups_returned, groups_cancelled."""
        self.queue = queue
        self._config, self._llm, self._awake = config, llm, awake or AwakeTime()
        self._remotes = {name: remote.open() for name in ("judge", "teacher") if (remote := getattr(config, name))}
        reward = (
            RewardFunction(
                config.reward,
                timeout=config.reward_timeout,
                kwargs=config.reward_kwargs,
                threads=config.reward_threads,
                judge=self._remotes.get("judge"),
            )
            if config.reward
            else None
        )
        if teacher is None and (remote := self._remotes.get("teacher")):
            from agent_loop.llm.remote_teacher import RemoteTeacher  # an HTTP client, which most workers never need

            teacher = RemoteTeacher(remote)
        chat = chat or ChatTokenizer.from_pretrained(config.model_path, config.template_kwargs)
        self._runner = SessionRunner(
            llm=llm,
            chat=chat,
            budgets=config.budgets,
            sampling=config.sampling,
            reward=reward,
            scored_later=config.scored_later,
            components=config.reward_components,
            tools=_load_tools(config.tools),
            seed=config.seed,
            seeded=config.seeded,
            timeout=config.session_timeout,
            awake=self._awake,
            on_span=on_span,
            teacher=Teacher(teacher, config.sampling.temperature) if teacher is not None else None,
            images=ImageRenderer(config.model_path, chat) if has_processor(config.model_path) else None,
        )
        default = config.default_agent_loop
        names = {default: default, **config.agent_loops}
        self._loops: dict[str, AgentLoop] = {name: load_agent_loop(spec) for name, spec in names.items()}
        self._slots = asyncio.Semaphore(config.max_sessions)
        self._leased = 0
        self._groups: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._room = asyncio.Event()
        self._stop = asyncio.Event()
        self._drain = 0.0
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until `stop`. Raises an ExceptionGroup when the queue is gone for good, or for a bug."""
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = [tasks.create_task(self._serve(p, tasks), name=f"serve-{p}") for p in self._config.partitions]
                await self._stop.wait()
                for task in serving:
                    task.cancel()
                await self._drained()
                raise _Stopped
        except* _Stopped:
            pass
        finally:
            await self._release_all()
            await asyncio.gather(*(remote.close() for remote in self._remotes.values()))
            self._ended.set()

    async def stop(self, *, drain: float = 0.0, timeout: float = 10.0) -> None:
        """Take nothing new; running sessions may finish for `drain` seconds, then their groups go back. Returns when
        `run` has ended; raises TimeoutError `timeout` seconds after the drain."""
        self._drain = drain
        self._stop.set()
        try:
            async with asyncio.timeout(drain + timeout):
                await self._ended.wait()
        except TimeoutError:
            raise TimeoutError(
                f"worker {self.name} did not end within {drain + timeout:g} s; is its run() running?"
            ) from None

    def cancel(self, partition: str, uids: Iterable[str]) -> None:
        """End these groups now, as far as they are here: somebody dropped them, and their leases with that. Requests
        that are under way are aborted, nothing more is written."""
        for uid in uids:
            if (running := self._groups.get((partition, uid))) is not None and running.cancel():
                self.counts["groups_cancelled"] += 1

    def reserve(self, servers: Sequence[str]) -> None:
        """From now on these LLM servers, and no others, are for groups whose tag says `reserved`."""
        self._llm.reserve(servers)

    def hear(self, news: FleetNews) -> dict[str, tuple[int, int]]:
        """Of the LLM servers. By server: requests and tokens of this worker in flight."""
        self._awake.tell(news.asleep)
        return self._llm.hear(news)

    def find_loop(self, name: str | None) -> AgentLoop:
        """The agent loop of a row with this `agent_name`. A row may only name what is registered or configured."""
        name = name or self._config.default_agent_loop
        if name not in self._loops:
            if name not in AGENT_LOOPS:
                known = ", ".join(sorted({*AGENT_LOOPS.names(), *self._loops}))
                raise PluginError(f"a row names agent loop {name!r}; rows may name {known}")
            self._loops[name] = load_agent_loop(name)
        return self._loops[name]

    async def _drained(self) -> None:
        try:
            async with asyncio.timeout(self._drain):
                while self._leased:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            logger.info("worker %s stops with %d sessions in hand", self.name, self._leased)

    async def _serve(self, partition: str, tasks: asyncio.TaskGroup) -> None:
        silent_since: float | None = None
        now = asyncio.get_running_loop().time
        while True:
            await self._wait_for_room()
            try:
                leased = await self.queue.lease(
                    partition, TASK, groups=1, wait=self._config.lease_wait, holder=self.name
                )
            except DeadlineExceeded:
                silent_since = None
            except Disconnected as error:
                silent_since = now() if silent_since is None else silent_since
                if now() - silent_since > self._config.queue_patience:
                    error.add_note(
                        f"worker {self.name} could not lease from {partition!r} for {now() - silent_since:.0f} s"
                    )
                    raise
                await asyncio.sleep(RETRY_PAUSE)
            else:
                silent_since = None
                for group in leased.groups:
                    self._leased += group.n - len(group.sessions)
                    run = GroupRun(
                        queue=self.queue, runner=self._runner, find_loop=self.find_loop, slots=self._slots,
                        partition=partition, group=group, token=leased.token, ttl=leased.ttl, counts=self.counts,
                        on_session_end=self._session_ended, returned=self._returned,
                    )  # fmt: skip
                    running = tasks.create_task(self._run_group(run), name=f"group-{partition}/{group.uid}")
                    self._groups[partition, group.uid] = running
                    running.add_done_callback(partial(self._group_ended, run))

    async def _wait_for_room(self) -> None:
        while self._leased >= self._config.max_sessions:
            self._room.clear()
            await self._room.wait()

    async def _run_group(self, run: GroupRun) -> None:
        self.counts[f"groups_{await run.run()}"] += 1

    def _session_ended(self) -> None:
        self._leased -= 1
        self._room.set()

    def _group_ended(self, run: GroupRun, task: asyncio.Task[None]) -> None:
        """Also of one that was cancelled before it began."""
        run.end()
        if self._groups.get((run.partition, run.group.uid)) is task:
            del self._groups[run.partition, run.group.uid]
        self._room.set()

    async def _release_all(self) -> None:
        """Groups in hand, and a grant whose answer we did not wait for, go to others at once."""
        try:
            async with asyncio.timeout(5.0):
                await self.queue.release_holder(self.name, died=not self._stop.is_set())
        except (Disconnected, DeadlineExceeded, TimeoutError) as error:
            logger.warning("worker %s could not release its leases, they will run out: %s", self.name, error)


class _Stopped(Exception):
    """Unwinds the task group of `run`, so that what still runs is cancelled."""


def _load_tools(specs: Mapping[str, Mapping[str, Any]]) -> dict[str, Tool]:
    tools: dict[str, Tool] = {}
    for spec, settings in specs.items():
        tool = load_tool(spec, **settings)
        if tool.name in tools:
            raise PluginError(f"two tools are called {tool.name!r}; the second is {spec!r}")
        tools[tool.name] = tool
    return tools
