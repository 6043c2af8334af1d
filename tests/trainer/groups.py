"""Ready groups as the queue tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transfer_queue.net.messages import Group, Row


def ready_group(uid: str, scores: Sequence[float], *, rows: int = 1, length: int = 4, **tag: Any) -> Group:
    """One session per score, `rows` rows each; the outcome stands on the last of them."""
    found = [
        Row(
            f"{uid}_{session}_{index}",
            {
                "session": session, "score": score if index == rows - 1 else 0.0, "response_len": length + session,
                "prompt_len": 3, "seq_len": 3 + length + session, "min_global_steps": 1, "max_global_steps": 1,
                "num_turns": 2,
            },
        )
        for session, score in enumerate(scores)
        for index in range(rows)
    ]  # fmt: skip
    return Group(uid, "ready", len(scores), int(uid.strip("u")), tag, rows=found)
