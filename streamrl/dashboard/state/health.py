"""Whether a run lives, by what it left in its directory: its last word, its heartbeat, its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamrl.monitor.run_view import ENDED

Condition = Literal["live", "stale", "dead", "ended"]

STALE_SECONDS = 7.0
"""Silence after which a run counts as stale, where it has a heartbeat (every two seconds)."""

SILENT_SECONDS = 60.0
"""... and where it has none (recorded by an older version): a step may take that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`condition` in one word, and why in one sentence."""

    condition: Condition
    why: str
    since: float = 0.0
    """Wall-clock time of the last sign of life."""

    @property
    def alive(self) -> bool:
        return self.condition == "live"


def health(*, status: str, process_alive: bool | None, last_sign: float, heartbeats: bool, now: float) -> Health:
    """`process_alive` of the trainer's: None where it cannot be told (another machine). `last_sign`: when its log last
    grew. A run that says that it has ended is believed."""
    if status in ENDED:
        return Health(
            condition="ended", why=f"The run has {'failed' if status == 'failed' else status}.", since=last_sign
        )
    silent = max(0.0, now - last_sign)
    if process_alive is False:
        return Health(
            condition="dead", since=last_sign,
            why="The trainer's process is gone, and left no word of an end: it was killed, or its machine went down.",
        )  # fmt: skip
    if silent > (STALE_SECONDS if heartbeats else SILENT_SECONDS):
        known = (
            "its process is there, but stands still" if process_alive else "whether it lives cannot be seen from here"
        )
        return Health(condition="stale", why=f"The run has written nothing for a while; {known}.", since=last_sign)
    return Health(condition="live", why="The run lives.", since=last_sign)
