"""What the manager of the LLM servers tells every agent worker once a beat, and at once when servers come or go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_loop.llm.protocol import LLMServer
from agent_loop.llm.router import ServerNews


@dataclass(frozen=True, slots=True)
class FleetNews:
    """To one worker. Servers are known by name."""

    routers: int = 1
    """Workers that share the servers."""
    servers: Mapping[str, ServerNews] = field(default_factory=dict)
    """Those that answered their last health check."""
    out: Mapping[str, str] = field(default_factory=dict)
    """Those that did not, and why."""
    draining: frozenset[str] = frozenset()
    newest: int | None = None
    """The newest weight version that any server may have; None: not known yet."""
    asleep: bool = False
    """All servers sleep: training has their devices."""
    handles: Mapping[str, LLMServer] | None = None
    """All servers there are; None if they are those that this worker was told last."""
