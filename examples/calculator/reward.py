"""The reward of the calculator task: 1.0 if the last turn says the right number, else 0.0.

A response is the text of all turns after the prompt, tool calls and tool results included, with or without the special
tokens. The policy answers with a turn `= 391`; what the calculator said is no answer, the policy has to say it.
"""

from __future__ import annotations

import re
from typing import Any

_SPECIAL = re.compile(r"<\|im_start\|>(?:system|user|assistant|tool)\n|<\|(?:im_start|im_end|endoftext)\|>")
_ANSWER = re.compile(r"[^=]*= ?(-?[0-9]+)\s*")


def final_answer(solution_str: str) -> str | None:
    """The number of the last turn; None if the response ends in anything but `= number`."""
    tail = solution_str.rpartition("</tool_call>")[2]
    if "<tool_call>" in tail:
        return None
    match = _ANSWER.fullmatch(_SPECIAL.sub("", tail))
    return match[1] if match else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """verl's signature."""
    return 1.0 if final_answer(solution_str) == ground_truth else 0.0


def compute_parts(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """The same score, with its parts for `algorithm.gdpo_reward_keys`: is it right, is there an answer at all."""
    answer = final_answer(solution_str)
    correct = 1.0 if answer == ground_truth else 0.0
    return {"score": correct, "correct": correct, "answered": 0.0 if answer is None else 1.0}
