"""Integer arithmetic, answered after a while, as a remote tool would."""

from __future__ import annotations

import ast
import math
import operator
import random
import re
from collections.abc import Callable
from typing import Any

from agent_loop.tools.base import ToolContext, ToolError, register_tool

MAX_LENGTH = 200
"""Characters of an expression; also bounds how deep parentheses can nest."""

MAX_BITS = 256
"""Of any operand or result: far beyond any exercise, and small enough that no product costs time or memory."""

_ALLOWED = re.compile(r"[0-9+\-*/%() ]*")
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[int], int]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expr: str) -> int:
    """The value of an expression of integers with + - * // % and parentheses. Raises ToolError. Nothing is executed."""
    if len(expr) > MAX_LENGTH:
        raise ToolError(f"expression of {len(expr)} characters is too long (at most {MAX_LENGTH})")
    if not _ALLOWED.fullmatch(expr):
        raise ToolError("only integers, + - * // % and parentheses are understood")
    try:
        tree = ast.parse(expr.strip(), mode="eval")
    except (SyntaxError, ValueError):
        raise ToolError("not a complete expression") from None
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            try:
                return _bounded(_BINARY[type(op)](_value(left), _value(right)))
            except ZeroDivisionError:
                raise ToolError("division by zero") from None
    raise ToolError("only + - * // % are understood")


def _bounded(value: int) -> int:
    if value.bit_length() > MAX_BITS:
        raise ToolError(f"number too large (over {MAX_BITS} bits)")
    return value


_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"expr": {"type": "string", "description": "for example 17*23"}},
    "required": ["expr"],
}


@register_tool("calculator")
class Calculator:
    """The latency is log-normal, in seconds, seeded per call; mean 0 answers at once."""

    name = "calculator"
    description = "Evaluates an expression of integers with + - * // % and parentheses."

    def __init__(self, latency_mean: float = 0.3, latency_sigma: float = 0.5) -> None:
        for name, value in (("latency_mean", latency_mean), ("latency_sigma", latency_sigma)):
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be finite and not negative, not {value}")
        self.parameters = _PARAMETERS
        self._mean, self._sigma = latency_mean, latency_sigma

    def latency(self, seed: int) -> float:
        """Seconds that the call with this seed takes."""
        if self._mean == 0:
            return 0.0
        return random.Random(seed).lognormvariate(math.log(self._mean) - self._sigma**2 / 2, self._sigma)

    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> str:
        if seconds := self.latency(ctx.seed):
            await ctx.sleep(seconds)
        return str(calculate(arguments["expr"]))
