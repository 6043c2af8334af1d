"""Scores of finished sessions, by a registered name or by the user's `path.py:function`.

The function has verl's signature: `compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)`,
sync or async, and returns a number or a dict with "score". Further numbers in it are components of the score, for
estimators that ask for them by name. A reward that breaks is not score 0: it fails the session. An async one with a
parameter `judge` is given the model that reward.judge names (agent_loop.llm.openai_remote.OpenAIRemote).
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from agent_loop.plugins import Registry
from agent_loop.rendering.chat import ChatTokenizer
from agent_loop.threads import in_daemon_thread
from agent_loop.trajectory import Trajectory

if TYPE_CHECKING:
    from agent_loop.llm.openai_remote import OpenAIRemote

REWARDS: Registry[Callable[..., Any]] = Registry("reward")
register_reward = REWARDS.register

JUDGE = "judge"
"""The parameter by which a reward function asks for one."""

MAX_SCORE = 3e38
"""Scores are stored as float32, which is infinite above 3.4e38."""


MAX_DETAILS = 256 << 10
"""Bytes of what a reward returns besides the score: every row of the session carries it, and the queue holds the rows
of several batches."""

PRED = "pred"
"""Of what a reward returns: the answer it found, by which answers are compared."""


class RewardError(RuntimeError):
    """The reward function raised, timed out, or returned no number, or too much beside it."""


@dataclass(frozen=True, slots=True)
class Score:
    value: float
    details: dict[str, Any] = field(default_factory=dict)
    """What the function returned besides "score"."""


class RewardFunction:
    """One reward of a run. A synchronous function that the user brought runs in a daemon thread: it cannot stop the
    other sessions or keep the process, and its time-out holds. A registered one is quick and runs in place.
    `threads=False` runs it in place too (a virtual clock does not know that a thread is busy)."""

    def __init__(
        self, spec: str, *, timeout: float = 60.0, kwargs: Mapping[str, Any] | None = None, threads: bool = True,
        judge: OpenAIRemote | None = None,
    ) -> None:  # fmt: skip
        """Raises PluginError; RewardError for a function that `judge` does not fit."""
        self.spec = spec
        self._compute = REWARDS.resolve(spec)
        self._in_place = spec in REWARDS or not threads
        self._timeout = timeout
        self._kwargs = dict(kwargs or {})
        if judge is not None:
            if misfit := judge_misfit(self._compute):
                raise RewardError(f"reward {spec!r} {misfit}")
            self._kwargs[JUDGE] = judge

    async def __call__(self, row: Mapping[str, Any], trajectory: Trajectory, chat: ChatTokenizer) -> Score:
        """`solution_str` is the whole response without special tokens. `extra_info` is the row's, with `num_turns` and
        `last_turn` (the text sampled last) added. Raises RewardError."""
        text = chat.decode(trajectory.response_ids, skip_special_tokens=True)
        extra = {
            **(row.get("extra_info") or {}),
            "num_turns": trajectory.num_turns,
            "last_turn": text if all(trajectory.response_mask) else last_turn(trajectory, chat),
        }
        arguments = dict(
            data_source=row.get("data_source"),
            solution_str=text,
            ground_truth=(row.get("reward_model") or {}).get("ground_truth"),
            extra_info=extra,
        )
        try:
            async with asyncio.timeout(self._timeout):
                result = await self._run(arguments)
        except TimeoutError:
            raise RewardError(f"reward {self.spec!r} gave no score within {self._timeout:g} s") from None
        return _as_score(self.spec, result)

    async def _run(self, arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._compute):
            return await self._compute(**arguments, **self._kwargs)
        if self._in_place:
            return self._compute(**arguments, **self._kwargs)
        compute = partial(self._compute, **arguments, **self._kwargs)
        return await in_daemon_thread(compute, f"reward {self.spec!r}")


def judge_misfit(function: Callable[..., Any]) -> str:
    """Why a judge cannot be given to it; empty if it can."""
    parameters = inspect.signature(function).parameters
    if JUDGE not in parameters and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return f"has no parameter {JUDGE!r}, and reward.judge names one; add it, or leave reward.judge out"
    return "" if inspect.iscoroutinefunction(function) else f"has a {JUDGE}, whose answers are awaited: use async def"


def _as_score(spec: str, result: Any) -> Score:
    details: dict[str, Any] = {}
    if isinstance(result, Mapping):
        details = {key: value for key, value in result.items() if key != "score"}
        if _bytes_of(details, MAX_DETAILS) > MAX_DETAILS:
            largest = max(details, key=lambda key: _bytes_of(details[key], 100 * MAX_DETAILS))
            raise RewardError(
                f"reward {spec!r} returned more than {MAX_DETAILS >> 10} KiB besides the score (most of it in "
                f"{largest!r}), and every row would carry it; return less, or write it to a file of yours"
            )
        result = result.get("score")
    return Score(finite_score(result, f"reward {spec!r} returned"), details)


def score_components(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Those of `names` that are among what was given with a score. Raises RewardError for one that is no number."""
    return {
        name: finite_score(given[name], f"component {name!r} of the score is", "a number")
        for name in names
        if name in given
    }


def told_numbers(given: Mapping[str, Any], limit: int) -> dict[str, float]:
    """Of what was given with a score: its finite numbers, at most `limit` of them, `acc` before others, and for `pred`
    a number that is the same for the same answer."""
    found: dict[str, float] = {}
    for name in sorted(given, key=lambda name: name not in ("acc", PRED)):
        value = given[name].item() if isinstance(given[name], np.generic) else given[name]
        if name == PRED:
            digest = hashlib.blake2b(str(value).encode("utf-8", "replace"), digest_size=6).digest()
            found[name] = float(int.from_bytes(digest, "little"))
        elif name != "score" and isinstance(name, str) and isinstance(value, int | float) and abs(value) <= MAX_SCORE:
            found[name] = float(value)
    return dict(islice(found.items(), limit))


def _bytes_of(value: Any, enough: int) -> int:
    """About how many bytes `value` takes; counting ends when it is more than `enough`."""
    total, waiting = 0, [value]
    while waiting and total <= enough:
        part = waiting.pop()
        total += 8
        if isinstance(part, str | bytes):
            total += len(part)
        elif isinstance(part, Mapping):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            waiting += part
        else:
            total += getattr(part, "nbytes", 0)
    return total


def finite_score(value: Any, source: str, expected: str = "a number or a dict with 'score'") -> float:
    """`value` as a float that stays finite in float32. Raises RewardError; `source` begins its message."""
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RewardError(f"{source} {reprlib.repr(value)}; expected {expected}") from None
    if not abs(score) <= MAX_SCORE:
        raise RewardError(f"{source} {score}; a score must be finite and at most {MAX_SCORE:g} in size")
    return score


def last_turn(trajectory: Trajectory, chat: ChatTokenizer) -> str:
    """The text of the last run of sampled tokens: what the model said after the last tool result."""
    end = len(trajectory.response_mask)
    while end and not trajectory.response_mask[end - 1]:
        end -= 1
    begin = end
    while begin and trajectory.response_mask[begin - 1]:
        begin -= 1
    return chat.decode(trajectory.response_ids[begin:end], skip_special_tokens=True)


@register_reward("last_integer")
def last_integer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, Any]:
    """1.0 if the last integer of the last turn is the ground truth, else 0.0."""
    numbers = re.findall(r"-?\d+", extra_info["last_turn"].replace(",", ""))
    predicted = numbers[-1] if numbers else ""
    return {"score": float(predicted == str(ground_truth).strip()), "pred": predicted}
