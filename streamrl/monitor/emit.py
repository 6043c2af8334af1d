"""One call for each thing that a trainer looks at regularly and writes to the event log as several events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from streamrl.monitor.events import EventLog
from transfer_queue.net.messages import QueueStats


class Load(Protocol):
    """The part of agent_loop.llm.protocol.ServerLoad that is written."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def weight_version(self) -> int: ...
    @property
    def tokens_generated(self) -> int: ...
    @property
    def busy_seconds(self) -> float: ...


def emit_queue(log: EventLog, stats: QueueStats) -> None:
    """The depth of the queue by state."""
    for partition, part in stats.partitions.items():
        for state, count in part.depth.items():
            log.counter("queue_groups", count, partition=partition, state=state)
        log.counter("queue_bytes", part.nbytes, partition=partition)


def emit_loads(log: EventLog, loads: Mapping[str, Load]) -> None:
    """What each LLM server does. Once a step at least: the overlap accounting takes slots and busy time from here."""
    for server, load in loads.items():
        log.counter("server_running", load.running, server=server)
        log.counter("server_waiting", load.waiting, server=server)
        log.counter("server_slots", load.slots, server=server)
        log.counter("server_tokens", load.tokens_generated, server=server)
        log.counter("server_busy_seconds", load.busy_seconds, server=server)
        log.counter("weight_version", load.weight_version, role="rollout", engine=server)


def emit_trainer_version(log: EventLog, version: int) -> None:
    """The version that the trainer holds (its optimizer steps), which the servers may not serve yet."""
    log.counter("weight_version", version, role="trainer", engine="")


def server_hook(log: EventLog, server: str) -> Callable[[str, dict[str, Any]], None]:
    """The hook that an LLM server reports to (streamrl/rollout/events.py); `log` is that of the server's process."""

    def on_event(name: str, fields: dict[str, Any]) -> None:
        rest = {key: value for key, value in fields.items() if key not in ("seconds", "server")}
        span = {"rollout.busy": "server_busy", "rollout.weights": "server_weights"}.get(name)
        if span is not None:
            now = log.clock()
            log.span_at(span, now - fields["seconds"], now, server=server, **rest)
        else:
            what = ": ".join(str(part) for part in (name.removeprefix("rollout."), rest.pop("reason", "")) if part)
            log.state("server", what, server=server, **rest)

    return on_event
