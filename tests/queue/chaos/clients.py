"""What all clients of a simulated job share: what they know of it, and how they write down what they try."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Hashable
from typing import Any, Literal

import numpy as np

from tests.queue.chaos.process import Process
from tests.queue.chaos.record import LATE, Attempt, ClientRecord
from tests.queue.chaos.world import World
from transfer_queue.errors import Conflict, Fenced, NotFound


class Clients:
    """A job: `groups` prompts from admission to a checkpoint that has passed them, and plain rows besides."""

    def __init__(self, world: World, *, groups: int, keys: int, rounds: int, durable: bool = False) -> None:
        """`durable`: all that they do is to survive the machine."""
        self.world, self.groups, self.keys, self.rounds = world, groups, keys, rounds
        self.durability: Literal["", "journal"] = "journal" if durable else ""
        self.record = ClientRecord()
        self.random = world.random
        self.sizes = {f"u{i}": self.random.randrange(1, 4) for i in range(groups)}
        self.version = 0  # the step that was trained last
        self.trainers = self.opened = 0  # the last that began, and the newest incarnation that one was told
        self.written = {0: 0, 1: 0}  # rounds of each writer of plain rows that are over
        self.fetched: list[str] = []
        self.unheard = 0  # fetches whose answer a death has taken
        self.drained = False

    def finished(self) -> bool:
        trained = len(self.record.final) == self.groups
        return trained and min(self.written.values()) >= self.rounds and self.drained

    def progress(self) -> str:
        return f"{len(self.record.final)} of {self.groups} groups, {self.written} rounds, {len(self.fetched)} fetched"

    @contextlib.asynccontextmanager
    async def _attempt(
        self, process: Process, names: list[Hashable] | list[str], digests: list[Any]
    ) -> AsyncIterator[None]:
        """Write down what is tried, then what came of it."""
        now = self.world.loop.time
        attempts: list[Attempt] = [
            self.record.register(name).begin(found, now()) for name, found in zip(names, digests, strict=True)
        ]
        outcome = "unknown"
        try:
            yield
            outcome = "acknowledged"
        except (Fenced, Conflict, NotFound):
            outcome = "refused"
            raise
        finally:
            for attempt in attempts:
                attempt.outcome = "unknown" if process.dead else outcome
                attempt.end = now() + (LATE if attempt.outcome == "unknown" else 0.0)

    def _bytes(self, most: int = 3000) -> np.ndarray:
        return np.frombuffer(self.random.randbytes(self.random.randrange(1, most)), np.uint8)
