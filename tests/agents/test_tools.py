"""Tools read hostile text, and answer it with text."""

from __future__ import annotations

import contextlib
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.plugins import PluginError
from agent_loop.tools.base import ToolContext, ToolError, check_arguments, load_tool
from agent_loop.tools.calculator import Calculator, calculate
from agent_loop.tools.hermes import ToolCall, parse_tool_calls


@pytest.mark.parametrize(
    ("expr", "value"),
    [("17*23", 391), ("-(3+4)//2", -4), (" 7 % 3 ", 1), ("2-3", -1), ("((((8))))", 8), ("+5--5", 10), ("-7%3", 2)],
)
def test_expressions(expr: str, value: int) -> None:
    assert calculate(expr) == value


@pytest.mark.parametrize(
    "expr",
    ["", "2**3", "1/2", "1 if 1 else 2", "__import__('os')", "9" * 100, "9" * 5000, "(((", "1(2)", "7//0", "1.5", "1,2",
     "0x10", "1<2", "True", "(" * 199, "007", "1\n+1"],
)  # fmt: skip
def test_anything_else_is_a_tool_error(expr: str) -> None:
    with pytest.raises(ToolError):
        calculate(expr)


@given(st.text(alphabet="0123456789+-*/%() ", max_size=220))
def test_no_expression_escapes(expr: str) -> None:
    with contextlib.suppress(ToolError):
        assert abs(calculate(expr)) < 2**256


async def test_the_latency_is_seeded_with_the_mean_asked_for() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    tool = Calculator(latency_mean=0.3, latency_sigma=0.5)
    assert await tool.call({"expr": "2*3"}, ToolContext(1, sleep)) == "6"
    assert await tool.call({"expr": "2*3"}, ToolContext(1, sleep)) == "6"
    assert slept[0] == slept[1] != tool.latency(2)
    assert statistics.fmean(tool.latency(seed) for seed in range(4000)) == pytest.approx(0.3, rel=0.05)
    assert Calculator(latency_mean=0).latency(1) == 0


def test_settings_of_a_tool_are_checked() -> None:
    with pytest.raises(PluginError, match=r"'calculator' does not take the settings \['speed'\]"):
        load_tool("calculator", speed=1)
    with pytest.raises(ValueError, match="latency_mean must be finite"):
        load_tool("calculator", latency_mean=-1)
    with pytest.raises(PluginError, match="did you mean 'calculator'"):
        load_tool("calculater")


def test_calls_are_parsed_in_order() -> None:
    text = 'so <tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call> and <tool_call>\n{"name": "b"}\n</tool_call>'
    assert parse_tool_calls(text) == [ToolCall("a", {"x": 1}), ToolCall("b", {})]
    assert parse_tool_calls("= 391") == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>{"name": "a"</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "a"}', "not closed"),
        ("<tool_call>[1]</tool_call>", "is an object"),
        ('<tool_call>{"name": 1}</tool_call>', "is an object"),
        ('<tool_call>{"name": "a", "arguments": "x"}</tool_call>', "must be an object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 10_000 + "}}</tool_call>", "not valid JSON"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(text: str, error: str) -> None:
    (call,) = parse_tool_calls(text)
    assert error in call.error


@given(st.text(alphabet='<tool_call>/{}[]":name,arguments 1', max_size=200))
def test_parsing_never_raises(text: str) -> None:
    for call in parse_tool_calls(text):
        assert isinstance(call.name, str)


def test_arguments_are_checked_against_the_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"expr": {"type": "string"}, "digits": {"type": "integer", "enum": [1, 2]}},
        "required": ["expr"],
    }
    assert check_arguments(schema, {"expr": "1", "digits": 2}) == ""
    assert check_arguments(schema, {}) == "missing argument 'expr'"
    assert check_arguments(schema, {"expr": 1}) == "argument 'expr' must be of type string"
    assert check_arguments(schema, {"expr": "1", "digits": True}) == "argument 'digits' must be of type integer"
    assert check_arguments(schema, {"expr": "1", "digits": 3}) == "argument 'digits' must be one of [1, 2]"
    assert check_arguments(schema, {"expr": "1", "z": 3}) == "unknown argument 'z', expected expr, digits"
