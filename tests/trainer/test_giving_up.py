"""Who is to blame when group after group fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.trainer.giving_up import GivingUp


@pytest.mark.parametrize(
    ("reason", "blamed"),
    [
        ("ZeroDivisionError: division by zero (agent.py:7)", "The agent loop, its tools or the reward function is"),
        ("PoisonRequest: 3 LLM servers died under this request", "The LLM servers, and not the agent loop"),
        ("50 attempts ended: server a broke the protocol: load raised 7", "The LLM servers, and not the agent"),
    ],
)
def test_the_reason_of_the_last_failure_says_what_is_broken(reason: str, blamed: str) -> None:
    buffer: Any = SimpleNamespace(failed_in_a_row=16, all_failed_alike=False)
    group: Any = SimpleNamespace(reason=f"failed: {reason}")
    giving_up = GivingUp(16, 0, lambda: True)
    giving_up.left([group], buffer)
    error = giving_up.failure(buffer)
    assert error is not None
    assert f"16 prompt groups in a row failed, the last with: {reason}. {blamed}" in str(error)
