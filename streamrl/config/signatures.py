"""Whether a function of the user's can be called as it will be. Its file is read for that, not run.

reward        compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs), by name; with
              reward.judge an async one that has `judge`, too
estimator     f(scores, group_index, ...), and by name whichever of ESTIMATOR_ARGUMENTS it has
policy loss   f(inputs, settings)
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ESTIMATOR_ARGUMENTS = ("norm_by_std", "lengths", "baselines", "components", "weights", "values", "gamma", "lam")
"""Of streamrl.algorithms.advantages.Estimator.sessions and .tokens."""
REWARD_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


class _Default:
    """Of a parameter, whatever it is."""

    def __repr__(self) -> str:
        return "..."


_DEFAULT = _Default()


@dataclass(frozen=True, slots=True)
class Caller:
    """How a function is called, and what to say to one that was written for another caller."""

    expected: str
    positional: int = 0
    named: tuple[str, ...] = ()
    """Always given."""
    optional: tuple[str, ...] = ()
    """Given to a function that has them."""
    foreign: Mapping[str, str] | None = None
    """Parameter -> what a function with such one was written for, and how it is adapted."""
    given_by: Mapping[str, str] | None = None
    """Parameter -> the setting by which a function that cannot do without it gets it."""
    awaited: bool = False
    """It must be an async function."""


_VERL_ESTIMATOR = (
    "it is written for verl: here `scores` has one number per session (token_level_rewards summed over the response), "
    "`group_index` says whose prompt each is (verl's index), and one advantage per session goes back"
)
_VERL_LOSS = (
    "it is written for verl: here `inputs` has log_probs, old_log_probs, advantages and mask, flat over tokens, "
    "`settings` the clips; a PolicyLoss per token goes back, which loss_agg_mode averages afterwards"
)
_VERL_BATCH = "it is written for verl's batch reward manager: here it is called for one answer at a time"
_TRL = "it is written for TRL: here it is called for one answer at a time, whose text is solution_str"

REWARD = Caller(
    "compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs), by name",
    named=REWARD_ARGUMENTS,
    foreign={"solution_strs": _VERL_BATCH, "data_sources": _VERL_BATCH, "completions": _TRL},
    given_by={"judge": "reward.judge.base_url and reward.judge.model name a judge"},
)
JUDGED_REWARD = Caller(
    "compute_score(data_source, solution_str, ground_truth, extra_info, judge, **reward_kwargs), by name",
    named=(*REWARD_ARGUMENTS, "judge"),
    awaited=True,
)
ESTIMATOR = Caller(
    "f(scores, group_index), and by name with any of " + ", ".join(ESTIMATOR_ARGUMENTS[:5]),
    positional=2,
    optional=ESTIMATOR_ARGUMENTS,
    foreign={"token_level_rewards": _VERL_ESTIMATOR, "response_mask": _VERL_ESTIMATOR},
)
TOKEN_ESTIMATOR = Caller(
    "f(rewards, masks), and by name with any of values, gamma, lam", positional=2, optional=ESTIMATOR_ARGUMENTS
)
POLICY_LOSS = Caller(
    "f(inputs, settings)", positional=2, foreign={"old_log_prob": _VERL_LOSS, "response_mask": _VERL_LOSS}
)
SERVER = Caller("f(config, events), which returns an LLMServer", positional=2)


def misfits(file: Path, name: str, caller: Caller, more: tuple[str, ...] = ()) -> Iterator[str]:
    """Why the function `name` of a file cannot be called so; nothing where that does not show without running it.
    `more` are further arguments that it is given by name. Raises SyntaxError."""
    node = _function(file, name)
    if node is None:
        return
    if caller is ESTIMATOR and _works_on_tokens(node):
        caller = TOKEN_ESTIMATOR
    signature = signature_of(node.args)
    known = [other for other in caller.optional if other in signature.parameters]
    try:
        signature.bind(*[None] * caller.positional, **dict.fromkeys((*caller.named, *known, *more)))
        reason = ""
    except TypeError as error:
        missing = [text for other, text in (caller.given_by or {}).items() if other in signature.parameters]
        reason = "; ".join([str(error), *missing])
    if caller.awaited and not reason and not isinstance(node, ast.AsyncFunctionDef):
        reason = "it awaits answers, so it must be an async def"
    advice = next((text for other, text in (caller.foreign or {}).items() if other in signature.parameters), "")
    if reason or advice:
        yield (
            f"{file}: {name}{signature} is called as {caller.expected}"
            + (f": {reason}" if reason else "")
            + (f"; {advice}" if advice else "")
            + " (docs/extending.md)"
        )


def _function(file: Path, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The last definition of `name` at the top level, unless a decorator may change what it takes."""
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name]
    if not found or not all(_registers(decorator) for decorator in found[-1].decorator_list):
        return None
    return found[-1]


def _registers(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name.startswith("register")


def _works_on_tokens(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    given = [word for call in node.decorator_list if isinstance(call, ast.Call) for word in call.keywords]
    return any(w.arg == "per" and isinstance(w.value, ast.Constant) and w.value.value == "token" for w in given)


def signature_of(arguments: ast.arguments) -> inspect.Signature:
    """Names and kinds."""
    of = inspect.Parameter
    positional = [*((arg, of.POSITIONAL_ONLY) for arg in arguments.posonlyargs),
                  *((arg, of.POSITIONAL_OR_KEYWORD) for arg in arguments.args)]  # fmt: skip
    without = len(positional) - len(arguments.defaults)
    found = [
        of(arg.arg, kind, default=of.empty if index < without else _DEFAULT)
        for index, (arg, kind) in enumerate(positional)
    ]
    if arguments.vararg:
        found.append(of(arguments.vararg.arg, of.VAR_POSITIONAL))
    found += [
        of(arg.arg, of.KEYWORD_ONLY, default=of.empty if default is None else _DEFAULT)
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        found.append(of(arguments.kwarg.arg, of.VAR_KEYWORD))
    return inspect.Signature(found)
