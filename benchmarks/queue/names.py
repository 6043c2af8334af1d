"""Keys and tags of rows, as verl makes them. Apart from the batches, so that it is imported without torch."""

from __future__ import annotations

from typing import Any


def keys_of(count: int, prefix: str = "") -> list[str]:
    """Keys of 41 characters, as verl's are: a uuid, a session, an index."""
    return [f"{prefix}{i:0{37 - len(prefix)}x}_0_0" for i in range(count)]


def tag_of(i: int) -> dict[str, Any]:
    """Seven scalars, as verl's ReplayBuffer keeps with each trajectory."""
    return {
        "status": "success", "prompt_len": 200 + i % 50, "response_len": 300 + i % 300, "seq_len": 500 + i % 350,
        "global_steps": i // 1024, "min_global_steps": i // 1024, "max_global_steps": i // 1024,
    }  # fmt: skip
