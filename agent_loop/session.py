"""One session: run the agent loop, score it, and make its rows, or say what kind of failure it was.

the agent's own    an exception in the loop, a tool or the reward → `Failed`, closes the session with the reason
infrastructure     no LLM server answers, the run stops           → `Interrupted`, the group goes back

With a teacher (agent_loop/teacher.py) its log-probs are one more column of the rows; waiting for them is not the
agent's time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace

from agent_loop.llm.awake import AwakeTime
from agent_loop.llm.metered import LLMPool, MeteredClient
from agent_loop.llm.protocol import SamplingParams, ServerDied
from agent_loop.loop import AgentContext, AgentLoop, Budgets, SpanSink, no_spans
from agent_loop.rendering.chat import ChatTokenizer
from agent_loop.rendering.images import ImageRenderer
from agent_loop.rewards import RewardError, RewardFunction, finite_score, score_components, told_numbers
from agent_loop.rows import MAX_COMPONENTS, Prompt, SessionRows, session_rows
from agent_loop.seeds import derive_seed
from agent_loop.teacher import Teacher
from agent_loop.tools.base import Tool
from agent_loop.trajectory import Trajectory
from agent_loop.user_code import place_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

SAMPLED_SESSIONS = "sampled_sessions"
"""In a group's tag: how many of its sessions are sampled as configured; those after them are greedy (a baseline for the
others: ReMax)."""

SEEDED_AS = "seeded_as"
"""In a group's tag: what its seeds derive from in place of its uid, where that is another after a restart."""

TELLS_ALL = "tells_all"
"""In a group's tag: that its rows tell the trainer every number the reward returned, and which answers are the same."""

RESERVED = "reserved"
"""In a group's tag: that it is sampled at servers that are reserved, if there are any."""

MAX_REASON = 500
"""Characters of a failure's reason that the queue keeps."""


SAMPLED = "generated_tokens"
MORE = ("teacher_seconds", "teacher_queue_seconds", "tool_calls")
"""Of a session's metrics: what its span tells of where it is."""

MAX_KINDS = 100
"""Kinds of failure that are told apart."""


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRunner:
    """What all sessions of a worker share."""

    llm: LLMPool
    chat: ChatTokenizer
    budgets: Budgets
    sampling: SamplingParams
    reward: RewardFunction | None = None
    scored_later: bool = False
    """Whether a session may end without a score, and has no column `rm_scores`, which is written then."""
    components: tuple[str, ...] = ()
    """Of a score: those whose values go with the rows, where it has them."""
    tools: Mapping[str, Tool] = field(default_factory=dict)
    seed: int = 0
    seeded: bool = True
    timeout: float = 3600.0
    """Seconds, without those in which the servers sleep (`awake`)."""
    awake: AwakeTime = field(default_factory=AwakeTime)
    on_span: SpanSink = no_spans
    teacher: Teacher | None = None
    images: ImageRenderer | None = None
    told: set[tuple[str, str]] = field(default_factory=set)
    """Type and place of the failures whose traceback is in the log."""

    async def run(
        self,
        loop: AgentLoop,
        prompt: Prompt,
        tag: Mapping[str, Any],
        *,
        partition: str,
        uid: str,
        session: int,
    ) -> SessionRows | Failed | Interrupted:
        """`tag` is the group's: it may set temperature, greedy, top_p, top_k, weight_version and reserved."""
        ctx = self._context(tag, partition, uid, session)
        begun = ctx.clock()
        try:
            outcome = await self._outcome(loop, prompt, ctx, uid, session, tells_all=bool(tag.get(TELLS_ALL)))
            if self.teacher is not None and partition in self.teacher.partitions and isinstance(outcome, SessionRows):
                outcome = await self._taught(self.teacher, outcome, ctx)
        except asyncio.CancelledError:  # what it sampled is waste, and is told
            self._report(None, ctx, begun, partition=partition, uid=uid, session=session)
            raise
        self._report(outcome, ctx, begun, partition=partition, uid=uid, session=session)
        return outcome

    def never_ran(self, *, partition: str, uid: str, session: int) -> None:
        """It was cancelled while it waited for its turn."""
        now = asyncio.get_running_loop().time()
        told = {"partition": partition, "uid": uid, "session": session, "status": "cancelled"}
        self.on_span("session", now, now, **told, tokens=0, engine_seconds=0.0)

    def _context(self, tag: Mapping[str, Any], partition: str, uid: str, session: int) -> AgentContext:
        metrics: dict[str, float] = {}

        def on_span(name: str, start: float, end: float | None, /, **fields: Any) -> None:
            self.on_span(name, start, end, uid=uid, session=session, **fields)

        return AgentContext(
            llm=MeteredClient(self.llm, metrics, reserved=bool(tag.get(RESERVED))),
            chat=self.chat,
            sampling=session_sampling(self.sampling, tag, session, self.chat),
            budgets=self.budgets,
            session=f"{partition}/{uid}_{session}",
            seed=derive_seed(self.seed, tag.get(SEEDED_AS, uid), session),
            tools=self.tools,
            metrics=metrics,
            clock=asyncio.get_running_loop().time,
            on_span=on_span,
            seeded=self.seeded,
            images=self.images,
        )

    async def _outcome(
        self, loop: AgentLoop, prompt: Prompt, ctx: AgentContext, uid: str, session: int, *, tells_all: bool
    ) -> SessionRows | Failed | Interrupted:
        row = {**prompt.fresh(), "uid": uid, "session": session}
        deadline = self.awake.limit(self.timeout)

        async def agent() -> SessionRows:
            async with deadline:
                trajectories = await loop.run(row, ctx)
                _check(trajectories, loop)
                scores, details = await self._scores(prompt, trajectories, ctx)
                own = {} if scores[-1] is None else {"score": scores[-1]}
                given = {**own, **details, **trajectories[-1].score_components}
                components = score_components(given, self.components)
                if tells_all:
                    components |= told_numbers(given, MAX_COMPONENTS - len(components))
            return session_rows(
                prompt, uid, session, trajectories, scores, ctx.metrics, details, components,
                scored_later=self.scored_later,
            )  # fmt: skip

        result = await contained(agent())
        if isinstance(result, SessionRows):
            return result
        cause = first_cause(result)
        if isinstance(cause, ServerDied):
            return Interrupted(str(cause))
        if isinstance(cause, TimeoutError | asyncio.CancelledError) and deadline.expired():
            return Failed(f"session did not end within {self.timeout:g} s")
        self._tell(cause, result, ctx)
        return Failed(_reason(cause))

    def _tell(self, cause: BaseException, error: BaseException, ctx: AgentContext) -> None:
        """The traceback goes to the log once, not with every session that fails in the same way."""
        kind = (type(cause).__name__, place_of(cause))
        if kind in self.told:
            logger.info("session %s failed likewise: %r", ctx.session, cause)
            return
        if len(self.told) < MAX_KINDS:
            self.told.add(kind)
        logger.warning("session %s failed: %r", ctx.session, cause, exc_info=error)

    async def _taught(
        self, teacher: Teacher, rows: SessionRows, ctx: AgentContext
    ) -> SessionRows | Failed | Interrupted:
        result = await contained(teacher.taught(rows, ctx))
        if isinstance(result, SessionRows):
            return result
        cause = first_cause(result)
        if isinstance(cause, ServerDied):
            return Interrupted(f"teacher: {cause}")
        logger.warning("the teacher did not score session %s: %r", ctx.session, cause, exc_info=result)
        return Failed(_reason(cause))

    async def _scores(
        self, prompt: Prompt, trajectories: list[Trajectory], ctx: AgentContext
    ) -> tuple[list[float | None], Mapping[str, Any]]:
        """The outcome belongs to the session: a trajectory without its own score gets that of the last one; None
        where it comes later."""
        last, details = trajectories[-1], {}
        outcome = last.score
        if outcome is None and self.reward is None and self.scored_later:
            return [None] * len(trajectories), details
        if outcome is None:
            if self.reward is None:
                raise RewardError("the agent loop set no score and no reward function is configured")
            begun = ctx.clock()
            score = await self.reward(prompt, last, self.chat)
            ctx.count("compute_score", ctx.clock() - begun)
            outcome, details = score.value, score.details
        scores = [outcome if trajectory.score is None else trajectory.score for trajectory in trajectories]
        return [finite_score(score, "the agent loop set") for score in scores], details

    def _report(
        self, outcome: SessionRows | Failed | Interrupted | None, ctx: AgentContext, begun: float, **labels: Any
    ) -> None:
        """`outcome` None: it was cancelled."""
        fields: dict[str, Any] = {
            "tokens": int(ctx.metrics.get(SAMPLED, 0)),
            **{name: ctx.metrics.get(name, 0.0) for name in ("engine_seconds", "queue_seconds", "tool_seconds")},
            **{name: ctx.metrics[name] for name in MORE if name in ctx.metrics},
        }
        match outcome:
            case SessionRows():
                fields |= {
                    "status": "success",
                    "turns": outcome.tags[-1]["num_turns"],
                    **{name: outcome.tags[-1][name] for name in ("score",) if name in outcome.tags[-1]},
                }
            case Failed(reason):
                fields |= {"status": "failed", "reason": reason}
            case Interrupted(reason):
                fields |= {"status": "interrupted", "reason": reason}
            case None:
                fields |= {"status": "cancelled"}
        self.on_span("session", begun, ctx.clock(), **labels, **fields)


def session_sampling(base: SamplingParams, tag: Mapping[str, Any], session: int, chat: ChatTokenizer) -> SamplingParams:
    """The sampling of a session: the run's, changed by its group's tag; stop tokens are the model's unless given."""
    greedy = tag.get("greedy") or session >= int(tag.get(SAMPLED_SESSIONS, session + 1))
    temperature = 0.0 if greedy else float(tag.get("temperature", base.temperature))
    return replace(
        base,
        temperature=temperature,
        top_p=float(tag.get("top_p", base.top_p)),
        top_k=int(tag.get("top_k", base.top_k)),
        weight_version=tag.get("weight_version", base.weight_version),
        stop_token_ids=base.stop_token_ids or chat.stop_token_ids,
    )


def first_cause(error: BaseException) -> BaseException:
    """The error itself; of a group, its lost server if it has one (that decides the class), else its first leaf."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    return first_cause((error.subgroup(ServerDied) or error).exceptions[0])


async def contained(code: Coroutine[Any, Any, T]) -> T | BaseException:
    """The result of the agent's code, or whatever it raised: also what is no Exception. Raises CancelledError only
    when the caller is cancelled, after the code has ended.

    The code has a task of its own, since it may cancel its own task, and since in Python 3.11 a TaskGroup that fails
    leaves its task marked as cancelled: in the caller's task neither could be told from the worker's stop.
    """

    async def catch() -> T | BaseException:
        try:
            return await code
        except BaseException as error:  # noqa: BLE001  (SystemExit in a task would end the event loop)
            return error

    task = asyncio.create_task(catch())
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    return asyncio.CancelledError("the agent's task was cancelled") if task.cancelled() else task.result()


def _reason(cause: BaseException) -> str:
    """On one line, ending with the line of the user's code that it came from."""
    own = "" if isinstance(cause, Exception) else " (raised by the agent's code, nothing outside asked for it)"
    place = place_of(cause)
    where = f" ({place})" if place else ""
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}{own}: {text}"[: MAX_REASON - len(where)] + where


def _check(trajectories: Any, loop: AgentLoop) -> None:
    name = type(loop).__name__
    if not isinstance(trajectories, list) or not all(isinstance(item, Trajectory) for item in trajectories):
        raise TypeError(f"{name}.run returned {type(trajectories).__name__}; expected a list of Trajectory")
    if not trajectories:
        raise ValueError(f"{name}.run returned no trajectory")
