"""The model may call tools, as often as its budgets allow.

prompt ─► sample ─► tool calls? ─no─► end
            ▲           │yes
            └─ results ◄┘   (appended with mask 0, never re-rendered)
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.loop import AgentContext, Budgets, register_agent_loop
from agent_loop.plugins import PluginError
from agent_loop.seeds import derive_seed
from agent_loop.tools.base import Tool, ToolContext, ToolError, check_arguments, tool_schema
from agent_loop.tools.hermes import ToolCall, parse_tool_calls
from agent_loop.trajectory import Trajectory


@register_agent_loop("tool_agent")
class ToolAgent:
    """Ends at the first turn without a tool call, or truncated: by `response_length` (also when the results of a turn
    would leave no room for another token: they are then not appended) or by `max_turns` (the last turn's calls do not
    run). So a trajectory always ends with a sampled token.
    """

    async def run(self, row: dict[str, Any], ctx: AgentContext) -> list[Trajectory]:
        tools = selected_tools(ctx.tools, row.get("tool_selection"))
        schemas = [tool_schema(tool) for tool in tools.values()]
        trajectory = await ctx.begin(row, schemas)
        trajectory.num_turns = 1
        for turn in itertools.count():
            tokens, reason = await ctx.sample(trajectory, turn)
            trajectory.num_turns += 1
            if reason == "length":
                ctx.count("truncated", 1)
                break
            calls = parse_tool_calls(ctx.chat.decode(tokens))
            if not calls:
                break
            if turn + 1 == ctx.budgets.max_turns:
                ctx.count("truncated", 1)
                break
            results = await run_tools(calls, ctx, tools, turn, row.get("tools_kwargs") or {})
            context = ctx.chat.render_tool_results(results, after=tokens[-1])
            if len(context) >= ctx.room(trajectory):
                ctx.count("truncated", 1)
                break
            trajectory.append_context(context)
            trajectory.num_turns += 1
        return [trajectory]


def selected_tools(tools: Mapping[str, Tool], selection: Sequence[str] | None) -> Mapping[str, Tool]:
    """Of all tools those that a row names; None: all. Raises PluginError for a name that is none of them."""
    if selection is None:
        return tools
    if unknown := [name for name in selection if name not in tools]:
        raise PluginError(f"tool_selection names {unknown[0]!r}; there is {', '.join(tools) or 'no tool'}")
    return {name: tools[name] for name in selection}


async def run_tools(
    calls: Sequence[ToolCall], ctx: AgentContext, tools: Mapping[str, Tool], turn: int, kwargs: dict[str, Any]
) -> list[str]:
    """The texts for the model, one per call that ran, and one more if there were too many calls."""
    allowed = calls[: ctx.budgets.max_parallel_calls]
    begun = ctx.clock()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_answer(call, ctx, tools, turn, i, kwargs)) for i, call in enumerate(allowed)]
    ctx.count("tool_seconds", ctx.clock() - begun)
    ctx.count("tool_calls", len(allowed))
    results = [_cut(task.result(), ctx.budgets) for task in tasks]
    if len(calls) > len(allowed):
        results.append(_failed(ctx, f"at most {ctx.budgets.max_parallel_calls} tool calls run in one turn"))
    return results


async def _answer(
    call: ToolCall, ctx: AgentContext, tools: Mapping[str, Tool], turn: int, index: int, kwargs: dict[str, Any]
) -> str:
    """The tool's text, or an error that the model can read."""
    if call.error:
        return _failed(ctx, call.error)
    tool = tools.get(call.name)
    if tool is None:
        return _failed(ctx, _unknown(call.name, tools))
    if wrong := check_arguments(tool.parameters, call.arguments):
        return _failed(ctx, wrong)
    tool_ctx = ToolContext(derive_seed(ctx.seed, "tool", turn, index), ctx.sleep, kwargs.get(call.name) or {})
    return await _call(tool, call, tool_ctx, ctx)


async def _call(tool: Tool, call: ToolCall, tool_ctx: ToolContext, ctx: AgentContext) -> str:
    begun = ctx.clock()
    ctx.on_span("tool", begun, None, tool=call.name)  # one that never ends is seen
    try:
        async with asyncio.timeout(ctx.budgets.tool_timeout):
            return await tool.call(call.arguments, tool_ctx)
    except ToolError as error:
        return _failed(ctx, str(error))
    except TimeoutError:
        return _failed(ctx, f"{call.name} gave no answer within {ctx.budgets.tool_timeout:g} s")
    except (KeyboardInterrupt, SystemExit) as error:  # in a child task they would end the event loop
        raise RuntimeError(f"tool {call.name!r} raised {type(error).__name__}: {error}") from error
    finally:
        ctx.on_span("tool", begun, ctx.clock(), tool=call.name)


def _failed(ctx: AgentContext, why: str) -> str:
    ctx.count("tool_errors", 1)
    return f"error: {why}"


def _unknown(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}" if known else "there are none"
    return f"unknown tool {name[:40]!r}, {hint}"


def _cut(text: str, budgets: Budgets) -> str:
    """At most `max_tool_response_length` characters of the result, with a mark where the rest was."""
    limit, mark = budgets.max_tool_response_length, "...(truncated)..."
    if len(text) <= limit:
        return text
    match budgets.tool_response_truncate_side:
        case "right":
            return text[:limit] + mark
        case "left":
            return mark + text[-limit:]
        case _:
            return text[: limit // 2] + mark + text[-(limit - limit // 2) :]
