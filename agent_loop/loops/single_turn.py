"""One question, one answer."""

from __future__ import annotations

from typing import Any

from agent_loop.loop import AgentContext, register_agent_loop
from agent_loop.trajectory import Trajectory


@register_agent_loop("single_turn_agent")
class SingleTurnAgent:
    """Samples until a stop token or until the response budget is used up."""

    async def run(self, row: dict[str, Any], ctx: AgentContext) -> list[Trajectory]:
        trajectory = await ctx.begin(row)
        trajectory.num_turns = 2
        _, reason = await ctx.sample(trajectory, turn=0)
        if reason == "length":
            ctx.count("truncated", 1)
        return [trajectory]
