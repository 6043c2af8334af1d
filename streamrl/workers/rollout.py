"""Generation as a method: an LLM server and the agent loops in the process of a rank, for loops that wait for a whole
batch of answers (examples/classical_loop). The streaming trainer has its servers and agents elsewhere.

    prompts ──agent loop (tools)──► Trajectory ──padded──► DataProto
                   ▲ │ tokens
                   │ ▼
               LLM server ◄── update_weights (shared memory)
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from agent_loop.llm.client import RoutedClient
from agent_loop.loop import AgentContext, load_agent_loop
from agent_loop.rendering.chat import ChatTokenizer
from agent_loop.seeds import derive_seed
from agent_loop.session import session_sampling
from agent_loop.tools.base import load_tool
from agent_loop.trajectory import Trajectory
from agent_loop.worker import WorkerConfig
from streamrl.rollout.building import build_server
from streamrl.rollout.server_config import RolloutServerConfig
from streamrl.single_controller.data_proto import DataProto
from streamrl.single_controller.decorator import Dispatch, register
from streamrl.single_controller.worker import RankInfo, Worker
from streamrl.weight_sync import WeightInfo
from streamrl.workers.held_rows import padded_trajectories


class RolloutWorker(Worker):
    """One rank, one LLM server. `agents` says what a session is: loop, tools, budgets, sampling."""

    def __init__(self, rank: RankInfo, server: RolloutServerConfig, agents: WorkerConfig, prompt_length: int) -> None:
        """`prompt_length`: P, to which prompts are padded; responses are to `agents.budgets.response_length`."""
        super().__init__(rank)
        self._settings, self._agents, self._prompt_length = server, agents, prompt_length
        self._events = asyncio.Runner()

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the server, load tools and chat template. Raises ValueError, PluginError, RenderingError."""
        number = self.rank.rank
        settings = replace(self._settings, server=f"server-{number}", seed=self._settings.seed + number)
        self._server = build_server(settings)
        self._llm = RoutedClient({settings.server: self._server})
        self._chat = ChatTokenizer.from_pretrained(self._agents.model_path, self._agents.template_kwargs)
        tools = [load_tool(spec, **given) for spec, given in self._agents.tools.items()]
        self._tools = {tool.name: tool for tool in tools}
        self._slots = asyncio.Semaphore(self._agents.max_sessions)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One session for each row of `raw_prompt`, `uid`, `session` and the other columns of a prompt; greedy with
        `meta_info["do_sample"]` False. The fields of `padded_trajectories`, and `num_turns`.

        The seed of a row is that of its uid and session, whatever rank it is on.
        """
        trajectories = self._run(self._sessions(prompts))
        tensors = padded_trajectories(trajectories, self._prompt_length, self._agents.budgets.response_length)
        return DataProto.from_dict(tensors, {"num_turns": [trajectory.num_turns for trajectory in trajectories]})

    @register(Dispatch.ONE_TO_ALL)
    def update_weights(self, info: WeightInfo) -> None:
        """Tokens sampled from now on are those of `info.version`. Raises WeightError."""
        self._run(self._server.update_weights(info.path, info.version))

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        if hasattr(self, "_server"):
            self._run(self._llm.close())
            self._run(self._server.close())
        self._events.close()

    async def _sessions(self, prompts: DataProto) -> list[Trajectory]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._session(prompts[i].non_tensor_batch, prompts.meta_info))
                for i in range(len(prompts))
            ]
        return [task.result() for task in tasks]

    async def _session(self, row: dict[str, Any], info: dict[str, Any]) -> Trajectory:
        uid, session = str(row["uid"]), int(row["session"])
        tag = {"greedy": not info.get("do_sample", True)}
        ctx = AgentContext(
            llm=self._llm, chat=self._chat, sampling=session_sampling(self._agents.sampling, tag, session, self._chat),
            budgets=self._agents.budgets, session=f"{uid}_{session}",
            seed=derive_seed(self._agents.seed, uid, session), tools=self._tools, seeded=self._agents.seeded,
        )  # fmt: skip
        loop = load_agent_loop(row.get("agent_name") or self._agents.default_agent_loop)
        async with self._slots:
            trajectories = await loop.run(dict(row), ctx)
        if len(trajectories) != 1:
            raise ValueError(
                f"session {ctx.session} has {len(trajectories)} rows; generate_sequences gives one for each row "
                "given. Agent loops that return several need the streaming trainer"
            )
        trajectories[0].validate()
        return trajectories[0]

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._events.run(work)
