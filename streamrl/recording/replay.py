"""A replayed run: recorded sessions in the place of agents, no servers, and the recorded steps in their order."""

from __future__ import annotations

from typing import Any

from streamrl.recording.record import FIELDS, Recording
from streamrl.trainer.loop import PARTITION, Trainer
from streamrl.trainer.modes import MODES
from streamrl.trainer.parts import Parts
from streamrl.trainer.selection import Selection
from transfer_queue.client import QueueClient
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.net.messages import Group, SessionClose, Token

LEASE_WAIT = 60.0


class ReplayAgents:
    """Consumes: prompt groups. Produces: their recorded rows, unchanged. Waits for: the next lease."""

    def __init__(self, queue: QueueClient, recording: Recording) -> None:
        self._queue, self._recording = queue, recording

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            try:
                leased = await self._queue.lease(PARTITION, "generate", groups=1, wait=LEASE_WAIT, holder="replay")
            except DeadlineExceeded:
                continue
            for group in leased.groups:
                await self._put(group, leased.token)

    async def cancel(self, partition: str, uids: list[str]) -> None:
        """Nothing takes time here."""

    async def reserve(self, servers: list[str]) -> None:
        """There are none."""

    async def _put(self, group: Group, token: Token) -> None:
        for session, rows in enumerate(self._recording.sessions(group.uid, group.n)):
            keys = [row.key for row in rows]
            await self._queue.put(
                PARTITION, keys, {name: [row.columns[name] for row in rows] for name in FIELDS},
                tags=[row.tag for row in rows], token=token, closes=[SessionClose(group.uid, session, keys)],
            )  # fmt: skip


class NoServers:
    """Nothing generates, so nobody takes weights."""

    async def update_weights(self, info: Any) -> None:
        return

    async def loads(self) -> dict[str, Any]:
        return {}

    async def pin(self, count: int) -> list[str]:
        return []

    async def unpin(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake_up(self) -> None: ...


def replay_trainer(parts: Parts, recording: Recording) -> Trainer:
    """A trainer of the configured mode that trains the recorded steps, each on the groups it had then."""
    mode = MODES[parts.config.trainer.v1.trainer_mode]

    class Replayed(mode):  # type: ignore[misc, valid-type]
        in_order = True

        @property
        def max_outstanding(self) -> int:
            return self.groups_per_step

        def _selection(self) -> Selection:
            return Selection()  # what was fit then is trained now

        def total_steps(self) -> int:
            return min(super().total_steps(), max(recording.steps))

        async def before_step(self) -> None:
            recorded = recording.steps[self.step + 1]
            self.buffer.buffer.place = {uid: place for place, uid in enumerate(recorded.uids)}
            await self.feeder.admit_orders(recorded.orders)
            await self.buffer.wait_ready(len(recorded.orders))

        def on_left(self, groups: list[Group]) -> None:
            return

    return Replayed(parts)  # pyright: ignore[reportAbstractUsage]  # the mode has the rest
