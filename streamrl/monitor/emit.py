"""One call for each thing that a trainer looks at regularly and writes to the event log as several events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

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
    @property
    def first_tokens(self) -> int: ...
    @property
    def queue_seconds(self) -> float: ...
    @property
    def first_token_seconds(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def cache_usage(self) -> float: ...
    @property
    def weights_seconds(self) -> float: ...
    @property
    def asleep(self) -> bool: ...


class TeacherLoad(Protocol):
    """The part of it that is written of a teacher's server."""

    @property
    def waiting(self) -> int: ...
    @property
    def tokens_scored(self) -> int: ...
    @property
    def busy_seconds(self) -> float: ...


def emit_queue(log: EventLog, stats: QueueStats) -> None:
    """The depth of the queue by state, ages and credit, and what its units hold."""
    for partition, part in stats.partitions.items():
        for state, count in part.depth.items():
            log.counter("queue_groups", count, partition=partition, state=state)
        log.counter("queue_bytes", part.nbytes, partition=partition)
        log.counter("queue_rows", part.rows, partition=partition)
        log.counter("queue_credit", part.max_groups, partition=partition)
        log.counter("queue_redelivered", part.redelivered, partition=partition)
        for state, seconds in part.oldest_age.items():
            log.counter("queue_oldest_age", seconds, partition=partition, state=state)
    for unit in stats.units:
        log.counter("unit_bytes", unit.used, unit=unit.unit, budget=unit.budget, spilled=unit.spilled, alive=unit.alive)


def emit_loads(log: EventLog, loads: Mapping[str, Load]) -> None:
    """What each LLM server does. Once a step at least: the overlap accounting takes slots and busy time from here."""
    for server, load in loads.items():
        log.counter("server_running", load.running, server=server)
        log.counter("server_waiting", load.waiting, server=server)
        log.counter("server_slots", load.slots, server=server)
        log.counter("server_tokens", load.tokens_generated, server=server)
        log.counter("server_busy_seconds", load.busy_seconds, server=server)
        log.counter("server_first_tokens", load.first_tokens, server=server)
        log.counter("server_queue_seconds", load.queue_seconds, server=server)
        log.counter("server_first_token_seconds", load.first_token_seconds, server=server)
        if load.prompt_tokens:
            log.counter("server_prompt_tokens", load.prompt_tokens, server=server)
            log.counter("server_cached_tokens", load.cached_tokens, server=server)
        log.counter("server_preemptions", load.preemptions, server=server)
        log.counter("server_cache_usage", load.cache_usage, server=server)
        log.counter("server_weights_seconds", load.weights_seconds, server=server)
        log.counter("weight_version", load.weight_version, role="rollout", engine=server)


def emit_teachers(log: EventLog, loads: Mapping[str, TeacherLoad]) -> None:
    """What each teacher server does. Not as `server_*`: it is no engine whose idle time generation could have used."""
    for server, load in loads.items():
        log.counter("teacher_waiting", load.waiting, server=server)
        log.counter("teacher_tokens", load.tokens_scored, server=server)
        log.counter("teacher_busy_seconds", load.busy_seconds, server=server)


def emit_trainer_version(log: EventLog, version: int) -> None:
    """The version that the trainer holds (its optimizer steps), which the servers may not serve yet."""
    log.counter("weight_version", version, role="trainer", engine="")
