"""The shipped loops, with budgets that hold over the whole trajectory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.llm.client import RoutedClient
from agent_loop.llm.protocol import SamplingParams
from agent_loop.loop import AgentContext, Budgets, load_agent_loop
from agent_loop.plugins import PluginError
from agent_loop.tools.base import Tool, ToolContext, ToolError, load_tool
from agent_loop.trajectory import Trajectory
from streamrl.rollout.sim.virtual_clock import run_virtual
from tests.agents.fakes import FakeServer, byte_chat, says

CALL = '<tool_call>{"name": "calculator", "arguments": {"expr": "17*23"}}</tool_call>'
ROW: dict[str, Any] = {"raw_prompt": [{"role": "user", "content": "17 * 23 = ?"}], "tools_kwargs": None}
CHAT = byte_chat()


def play(
    *turns: str, loop: str = "tool_agent", tools: list[Tool] | None = None, seed: int = 0, **budgets: Any
) -> tuple[Trajectory, AgentContext, FakeServer]:
    """One session against a server that says `turns`, checked against the invariants of any trajectory."""
    server = FakeServer(says(*turns))
    made = tools if tools is not None else [load_tool("calculator", latency_mean=0)]
    ctx = AgentContext(
        llm=RoutedClient({"a": server}),
        chat=CHAT,
        sampling=SamplingParams(1, stop_token_ids=CHAT.stop_token_ids),
        budgets=Budgets(**{"response_length": 1000, **budgets}),
        session="s",
        seed=seed,
        tools={tool.name: tool for tool in made},
    )
    (trajectory,) = run_virtual(load_agent_loop(loop).run(ROW, ctx))
    trajectory.validate()
    assert len(trajectory.response_ids) <= ctx.budgets.response_length
    assert trajectory.response_mask[-1] == 1, "a trajectory ends with a sampled token"
    return trajectory, ctx, server


def texts(trajectory: Trajectory) -> list[tuple[int, str]]:
    """The response as (mask, text) of its runs."""
    runs: list[tuple[int, list[int]]] = []
    for token, mask in zip(trajectory.response_ids, trajectory.response_mask, strict=True):
        if not runs or runs[-1][0] != mask:
            runs.append((mask, []))
        runs[-1][1].append(token)
    return [(mask, CHAT.decode(tokens)) for mask, tokens in runs]


def tool_text(*turns: str, **kwargs: Any) -> str:
    """What the first tool turn said."""
    text = texts(play(*turns, **kwargs)[0])[1][1]
    return text.partition("<tool_response>\n")[2].partition("\n</tool_response>")[0]


def test_a_single_turn_ends_with_its_stop_token() -> None:
    trajectory, _, _ = play("= 391", loop="single_turn_agent")
    assert texts(trajectory) == [(1, "= 391<|im_end|>")]
    assert trajectory.num_turns == 2


def test_a_single_turn_is_cut_at_the_budget() -> None:
    trajectory, ctx, _ = play("= 391", loop="single_turn_agent", response_length=3)
    assert texts(trajectory) == [(1, "= 3")]
    assert ctx.metrics["truncated"] == 1


def test_tool_text_has_mask_0_and_history_is_extended_token_by_token() -> None:
    trajectory, ctx, server = play(CALL, "= 391")
    (_, call), (mask, tool), (_, answer) = texts(trajectory)
    assert call == CALL + "<|im_end|>"
    assert (mask, answer) == (0, "= 391<|im_end|>")
    assert tool == "\n<|im_start|>user\n<tool_response>\n391\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    last = server.calls[-1][1]
    assert last == (trajectory.prompt_ids + trajectory.response_ids)[: len(last)]
    assert trajectory.num_turns == 4
    assert ctx.metrics["tool_calls"] == 1


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ('<tool_call>{"name": "calculator"</tool_call>', "error: the tool call is not valid JSON"),
        ('<tool_call>{"name": "calculater"}</tool_call>', "error: unknown tool 'calculater', did you mean calculator?"),
        ('<tool_call>{"name": "calculator", "arguments": {"e": "1"}}</tool_call>', "error: missing argument 'expr'"),
        ('<tool_call>{"name": "calculator", "arguments": {"expr": "1/0"}}</tool_call>', "error: only + - * // % are"),
        ("<tool_call>", "error: the tool call is not closed"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_answered_with_an_error_text(turn: str, said: str) -> None:
    assert tool_text(turn, "= 1").startswith(said)


def test_the_response_budget_spans_all_turns() -> None:
    whole, _, _ = play(CALL, "= 391")
    size = len(whole.response_ids)
    cut, ctx, server = play(CALL, "= 391", response_length=size - 2)
    assert cut.response_ids == whole.response_ids[: size - 2]
    assert server.calls[-1][2].max_tokens == len(CHAT.encode("= 391<|im_end|>")) - 2
    assert ctx.metrics["truncated"] == 1


def test_tool_text_that_leaves_no_room_is_not_appended() -> None:
    first = len(CHAT.encode(CALL + "<|im_end|>"))
    trajectory, ctx, server = play(CALL, "= 391", response_length=first + 40)
    assert texts(trajectory) == [(1, CALL + "<|im_end|>")]
    assert len(server.calls) == 1
    assert ctx.metrics["truncated"] == 1


def test_a_call_cut_by_the_budget_does_not_run() -> None:
    trajectory, ctx, _ = play(CALL, response_length=20)
    assert texts(trajectory) == [(1, CALL[:20])]
    assert "tool_calls" not in ctx.metrics


def test_the_calls_of_the_last_allowed_turn_do_not_run() -> None:
    trajectory, ctx, server = play(CALL, CALL, CALL, max_turns=2)
    assert [mask for mask, _ in texts(trajectory)] == [1, 0, 1]
    assert len(server.calls) == 2
    assert ctx.metrics["tool_calls"] == 1


def test_calls_beyond_the_limit_get_an_error() -> None:
    trajectory, ctx, _ = play(CALL * 5, "= 391", max_parallel_calls=2)
    said = texts(trajectory)[1][1]
    assert said.count("\n391\n") == 2
    assert said.count("error: at most 2 tool calls run in one turn") == 1
    assert ctx.metrics["tool_calls"] == 2


class Slow:
    name, description = "slow", ""

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {"type": "object", "properties": {"seconds": {"type": "number"}}}
        self.contexts: list[ToolContext] = []

    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> str:
        self.contexts.append(ctx)
        await ctx.sleep(arguments["seconds"])
        return "x" * 100


def slow(seconds: float) -> str:
    return f'<tool_call>{{"name": "slow", "arguments": {{"seconds": {seconds}}}}}</tool_call>'


def test_calls_of_one_turn_run_at_the_same_time_and_each_has_its_own_time_out() -> None:
    trajectory, ctx, _ = play(
        slow(4) + slow(1e6) + slow(4), "= 1", tools=[Slow()], tool_timeout=5, max_tool_response_length=200
    )
    said = texts(trajectory)[1][1]
    assert said.count("x" * 100) == 2
    assert "error: slow gave no answer within 5 s" in said
    assert ctx.metrics["tool_seconds"] == pytest.approx(5)


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("right", "x" * 10 + "...(truncated)..."),
        ("left", "...(truncated)..." + "x" * 10),
        ("middle", "xxxxx...(truncated)...xxxxx"),
    ],
)
def test_long_results_are_cut(side: str, text: str) -> None:
    assert (
        tool_text(slow(0), "= 1", tools=[Slow()], max_tool_response_length=10, tool_response_truncate_side=side) == text
    )


def test_seeds_differ_by_turn_and_by_call_and_only_by_these() -> None:
    tool, again = Slow(), Slow()
    _, _, server = play(slow(1) + slow(1), slow(1), "= 1", tools=[tool], seed=7)
    seeds = [sampling.seed for _, _, sampling in server.calls]
    assert len(set(seeds)) == 3
    assert len({ctx.seed for ctx in tool.contexts}) == 3
    _, _, repeated = play(slow(1) + slow(1), slow(1), "= 1", tools=[again], seed=7)
    assert [sampling.seed for _, _, sampling in repeated.calls] == seeds
    assert [ctx.seed for ctx in again.contexts] == [ctx.seed for ctx in tool.contexts]


def test_a_tool_that_breaks_fails_the_session() -> None:
    class Broken(Slow):
        async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> str:
            raise ZeroDivisionError("a bug")

    with pytest.raises(ExceptionGroup) as caught:
        play(slow(1), tools=[Broken()])
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)


def test_a_tool_error_is_told_to_the_model() -> None:
    class Refusing(Slow):
        async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> str:
            raise ToolError("not today")

    assert tool_text(slow(1), "= 1", tools=[Refusing()]) == "error: not today"


TURNS = st.lists(
    st.sampled_from([CALL, CALL * 3, "= 391", "<tool_call>{", '<tool_call>{"name": "x"}</tool_call>', "", "é" * 30]),
    min_size=1,
    max_size=5,
)


@given(
    turns=TURNS,
    response_length=st.integers(1, 400),
    max_turns=st.none() | st.integers(1, 4),
    parallel=st.integers(1, 3),
)
def test_whatever_the_model_says_budgets_hold_and_tokens_in_are_tokens_out(
    turns: list[str], response_length: int, max_turns: int | None, parallel: int
) -> None:
    trajectory, ctx, server = play(
        *turns, response_length=response_length, max_turns=max_turns, max_parallel_calls=parallel
    )
    whole = trajectory.prompt_ids + trajectory.response_ids
    assert all(whole[: len(prompt)] == prompt for _, prompt, _ in server.calls), (
        "history is extended, never re-rendered"
    )
    assert ctx.metrics.get("tool_calls", 0) <= parallel * len(server.calls)
    assert max_turns is None or len(server.calls) <= max_turns
    assert sum(sampling.max_tokens for _, _, sampling in server.calls) >= sum(trajectory.response_mask)


def test_a_tool_gets_what_the_row_says_to_it() -> None:
    tool = Slow()
    row = {**ROW, "tools_kwargs": {"slow": {"secret": 5}}}
    llm = RoutedClient({"a": FakeServer(says(slow(0), "= 1"))})
    ctx = AgentContext(llm, CHAT, SamplingParams(1), Budgets(response_length=900), "s", 0, {"slow": tool})
    run_virtual(load_agent_loop("tool_agent").run(row, ctx))
    assert tool.contexts[0].kwargs == {"secret": 5}


def test_a_row_may_select_its_tools() -> None:
    tools = {"slow": Slow(), "calculator": load_tool("calculator")}

    def play_row(selection: list[str] | None) -> FakeServer:
        server = FakeServer(says(slow(0), "= 1"))
        ctx = AgentContext(RoutedClient({"a": server}), CHAT, SamplingParams(1), Budgets(900), "s", 0, tools)
        run_virtual(load_agent_loop("tool_agent").run({**ROW, "tool_selection": selection}, ctx))
        return server

    assert "= 1" not in CHAT.decode(play_row(None).calls[-1][1])
    assert "unknown tool 'slow'" in CHAT.decode(play_row(["calculator"]).calls[-1][1])
    with pytest.raises(PluginError, match="tool_selection names 'nothing'; there is slow, calculator"):
        play_row(["nothing"])


def test_budgets_are_checked() -> None:
    with pytest.raises(ValueError, match="max_turns must be positive, not 0"):
        Budgets(max_turns=0)


def test_sessions_overlap_their_tool_time() -> None:
    async def main() -> float:
        server = FakeServer(says(slow(10), "= 1"), seconds=1.0)
        client, tool = RoutedClient({"a": server}), Slow()

        def context(i: int) -> AgentContext:
            return AgentContext(
                client, CHAT, SamplingParams(1), Budgets(response_length=1000), f"s{i}", i, {"slow": tool}
            )

        loop = load_agent_loop("tool_agent")
        await asyncio.gather(*(loop.run(ROW, context(i)) for i in range(20)))
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(12.0)
