"""What an agent loop is, what it is given, and how it is found.

@register_agent_loop("my_agent")
class MyAgent:
    async def run(self, row, ctx):
        trajectory = await ctx.begin(row)
        await ctx.sample(trajectory, turn=0)
        return [trajectory]
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from msgspec.structs import replace

from agent_loop.llm.protocol import LLMClient, SamplingParams, StopReason
from agent_loop.plugins import PluginError, Registry
from agent_loop.rendering.chat import ChatTokenizer
from agent_loop.rendering.images import ImageRenderer, media_shown
from agent_loop.seeds import derive_seed
from agent_loop.threads import in_daemon_thread
from agent_loop.tools.base import Tool
from agent_loop.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of a whole trajectory, aborts and resumptions included."""

    response_length: int = 256
    """Tokens of the response, sampled and tool text together."""
    max_turns: int | None = None
    """Assistant turns; None: only the tokens bound them."""
    max_tool_response_length: int = 256
    """Characters of one tool result."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Which part of a longer result is cut out."""
    max_parallel_calls: int = 4
    """Tool calls of one turn that run; to the rest the model gets an error."""
    tool_timeout: float = 30.0
    """Seconds for one tool call."""

    def __post_init__(self) -> None:
        for name in ("response_length", "max_turns", "max_tool_response_length", "max_parallel_calls", "tool_timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        if self.tool_response_truncate_side not in ("left", "middle", "right"):
            raise ValueError(
                f"tool_response_truncate_side must be left, middle or right, not {self.tool_response_truncate_side!r}"
            )


class SpanSink(Protocol):
    """Where measured times go (streamrl.monitor: EventLog.span_at). `start` and `end` are the event loop's time; no
    end: something has begun, and is told again when it has one."""

    def __call__(self, name: str, start: float, end: float | None, /, **fields: Any) -> None: ...


def no_spans(name: str, start: float, end: float | None, /, **fields: Any) -> None:
    """The sink of a run that nobody watches."""


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class AgentContext:
    """Everything one session may use. `clock` and `sleep` are the only time there is, so a virtual clock works."""

    llm: LLMClient
    chat: ChatTokenizer
    sampling: SamplingParams
    """Temperature, cuts and stop tokens; `max_tokens` and `seed` are set per turn (`sampling_of`)."""
    budgets: Budgets
    session: str
    """Unique among the running sessions; later turns find their prefix cache by it."""
    seed: int
    """Derived from (run seed, uid, session)."""
    tools: Mapping[str, Tool] = field(default_factory=dict)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = _loop_time
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums over the session; a loop may add its own."""
    on_span: SpanSink = no_spans
    seeded: bool = True
    """Whether the engine gets a seed per turn."""
    images: ImageRenderer | None = None
    """Of a model that has a processor."""

    async def begin(self, row: Mapping[str, Any], tools: Sequence[dict[str, Any]] = ()) -> Trajectory:
        """A trajectory with the row's messages as its prompt, images by the model's processor. `tools` are JSON
        schemas. Raises RenderingError."""
        if self.images is None or "image" not in media_shown(row):
            return Trajectory(prompt_ids=self.chat.render_prompt(row["raw_prompt"], tools))
        render = partial(self.images.render, row, tools)
        prompt = await in_daemon_thread(render, "image processor")
        return Trajectory(list(prompt.ids), images=prompt.images, multi_modal_inputs=prompt.multi_modal_inputs)

    def count(self, metric: str, amount: float) -> None:
        self.metrics[metric] = self.metrics.get(metric, 0.0) + amount

    def sampling_of(self, turn: int, max_tokens: int) -> SamplingParams:
        seed = derive_seed(self.seed, "turn", turn) if self.seeded else None
        return replace(self.sampling, max_tokens=max_tokens, seed=seed)

    def room(self, trajectory: Trajectory) -> int:
        """Response tokens that the budget still allows."""
        return self.budgets.response_length - len(trajectory.response_ids)

    async def sample(self, trajectory: Trajectory, turn: int) -> tuple[list[int], StopReason]:
        """Extend the trajectory by one assistant turn within its budget; the new tokens and why they ended."""
        history = trajectory.prompt_ids + trajectory.response_ids
        sampling = self.sampling_of(turn, self.room(trajectory))
        shown = {"images": trajectory.images} if trajectory.images else {}
        generation = await self.llm.generate(history, sampling, session=self.session, **shown)
        trajectory.append_sampled(generation.token_ids, generation.log_probs, generation.weight_versions)
        return generation.token_ids, generation.stop_reason


class AgentLoop(Protocol):
    """One instance serves all sessions of a worker, so `run` keeps its state in local variables."""

    async def run(self, row: dict[str, Any], ctx: AgentContext) -> list[Trajectory]:
        """The trajectories of one session, at least one. `row` has the prompt columns (raw_prompt, data_source,
        reward_model, extra_info, tools_kwargs, uid). An exception ends the session as failed with its text."""
        ...


AGENT_LOOPS: Registry[Callable[..., AgentLoop]] = Registry("agent loop")
register_agent_loop = AGENT_LOOPS.register


def load_agent_loop(spec: str, **config: Any) -> AgentLoop:
    """The loop registered as `spec` or at `path/to/file.py:Class`, made with `config`. Raises PluginError."""
    import agent_loop.loops.single_turn  # they register themselves
    import agent_loop.loops.tool  # noqa: F401

    made = AGENT_LOOPS.resolve(spec)
    if not isinstance(made, type):
        raise PluginError(
            f"agent loop {spec!r} is a {type(made).__name__}; expected a class with `async def run(self, row, ctx)`"
        )
    if not inspect.iscoroutinefunction(getattr(made, "run", None)):
        raise PluginError(f"agent loop {spec!r}: {made.__name__} has no `async def run(self, row, ctx)`")
    if len(inspect.signature(made.run).parameters) != 3:
        raise PluginError(f"agent loop {spec!r}: run{inspect.signature(made.run)} should be run(self, row, ctx)")
    try:
        return made(**config)
    except TypeError as error:
        raise PluginError(f"agent loop {spec!r} does not take the settings {sorted(config)}: {error}") from error
