"""What teacher servers scored between two steps, also when one of them was started again."""

from __future__ import annotations

import pytest

from agent_loop.llm.protocol import ServerLoad
from streamrl.trainer.step_line import TeacherCounts


def load(rows: int, tokens: int, waited: float) -> ServerLoad:
    return ServerLoad(0, 0, 1, 0, 0, 0.0, rows, tokens, waited)


def test_counts_of_a_step_are_what_came_since_the_last_and_a_restart_counts_from_zero() -> None:
    counts = TeacherCounts()
    counts.look({"a": load(2, 20, 1.0), "b": load(2, 10, 3.0)})
    assert counts.step_metrics() == {"teacher/tokens_scored": 30.0, "teacher/queue_s": 1.0}
    counts.look({"a": load(4, 50, 2.0)})  # b does not answer
    assert counts.step_metrics() == {"teacher/tokens_scored": 30.0, "teacher/queue_s": 0.5}
    counts.look({"a": load(4, 50, 2.0), "b": load(1, 7, 0.25)})
    assert counts.step_metrics() == {"teacher/tokens_scored": 7.0, "teacher/queue_s": pytest.approx(0.25)}
    counts.look({"a": load(4, 50, 2.0), "b": load(1, 7, 0.25)})
    assert counts.step_metrics() == {"teacher/tokens_scored": 0.0, "teacher/queue_s": 0.0}
