"""Tool calls in the hermes form: `<tool_call>{"name": "calculator", "arguments": {"expr": "17*23"}}</tool_call>`.

The text comes from a model: it is hostile input. Whatever is wrong with a call becomes its `error`, never an exception.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it; with `error` set it cannot be made."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def parse_tool_calls(text: str) -> list[ToolCall]:
    """All calls of an assistant turn, in order."""
    return [_parse(match[1], closed=match[2] != "") for match in _CALL.finditer(text)]


def _parse(body: str, *, closed: bool) -> ToolCall:
    if not closed:
        return ToolCall(error="the tool call is not closed by </tool_call>")
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return ToolCall(error='the tool call is not valid JSON; expected {"name": ..., "arguments": {...}}')
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(error='a tool call is an object with "name" and "arguments"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(name=call["name"], error='"arguments" must be an object')
    return ToolCall(name=call["name"], arguments=arguments)
