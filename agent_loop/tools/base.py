"""What a tool is: a name, a JSON schema, and an async call that returns text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from agent_loop.plugins import PluginError, Registry


class ToolError(Exception):
    """The call cannot be answered; the text goes to the model, which may try again."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a call may use besides its arguments. `sleep` is the only way to wait, so that a virtual clock works."""

    seed: int
    sleep: Callable[[float], Awaitable[None]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The row's `tools_kwargs` for this tool: data that the model does not see."""


@runtime_checkable
class Tool(Protocol):
    """Shared by all sessions of a worker, so it holds no state of a session."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object."""

    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> str:
        """`arguments` have passed `check_arguments`. Raises ToolError; any other exception fails the session."""
        ...


TOOLS: Registry[Callable[..., Tool]] = Registry("tool")
register_tool = TOOLS.register


def load_tool(spec: str, **config: Any) -> Tool:
    """The tool registered as `spec` or at `path.py:Class`, made with `config`. Raises PluginError."""
    import agent_loop.tools.calculator  # noqa: F401  (registers itself)

    made = TOOLS.resolve(spec)
    try:
        tool = made(**config)
    except TypeError as error:
        raise PluginError(f"tool {spec!r} does not take the settings {sorted(config)}: {error}") from error
    if not isinstance(tool, Tool):
        raise PluginError(
            f"tool {spec!r} made a {type(tool).__name__}; a tool has name, description, parameters and call()"
        )
    return tool


def tool_schema(tool: Tool) -> dict[str, Any]:
    """The form in which chat templates show a tool to the model."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "array": (list,), "object": (dict,), "null": (type(None),),
}  # fmt: skip


def check_arguments(parameters: Mapping[str, Any], arguments: Any) -> str:
    """What is wrong with the arguments, or "". Checks presence, unknown names, top-level types and enums."""
    if not isinstance(arguments, dict):
        return f"arguments must be an object, not {type(arguments).__name__}"
    properties: Mapping[str, Any] = parameters.get("properties", {})
    if missing := [name for name in parameters.get("required", ()) if name not in arguments]:
        return f"missing argument {missing[0]!r}"
    for name, value in arguments.items():
        if name not in properties:
            if parameters.get("additionalProperties"):
                continue
            return f"unknown argument {name!r}, expected {', '.join(properties) or 'none'}"
        wanted = properties[name].get("type")
        allowed = _TYPES.get(wanted, (object,)) if isinstance(wanted, str) else (object,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and wanted in ("integer", "number")):
            return f"argument {name!r} must be of type {wanted}"
        if "enum" in properties[name] and value not in properties[name]["enum"]:
            return f"argument {name!r} must be one of {properties[name]['enum']}"
    return ""
