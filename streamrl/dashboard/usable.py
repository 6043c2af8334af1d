"""Which events are taken in: those that are as monitor/schema.py says. A run directory may come from another version,
be damaged or forged; what is let through here, no view has to check again."""

from __future__ import annotations

import math
from typing import Any

from streamrl.monitor.events import Event
from streamrl.monitor.schema import EVENTS

FURTHEST = 1e11
"""Seconds: the year 5138."""

LARGEST = 1e18

NUMBERS = (
    "step", "groups", "samples", "dropped", "version", "generation_stalled", "session", "tokens", "turns",
    "engine_seconds", "queue_seconds", "tool_seconds", "cores", "unit", "budget", "spilled", "pid",
)  # fmt: skip
"""Fields that are numbers wherever they stand."""


def usable(event: Event) -> bool:
    """Whether this event is as the table says."""
    if not (abs(event.start) < FURTHEST and abs(event.end) < FURTHEST and event.end >= event.start):
        return False
    fields = event.fields
    if not all(_is_number(fields[name]) for name in NUMBERS if name in fields):
        return False
    if event.kind == "process":
        return _is_number(event.value)
    spec = EVENTS.get(event.name)
    if spec is None or (event.kind != spec.kind and not (event.kind == "begin" and spec.kind == "span")):
        return False
    if event.kind in ("counter", "metrics") and not _is_number(event.value):
        return False
    return event.kind != "counter" or all(field in fields for field in spec.fields)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < LARGEST
