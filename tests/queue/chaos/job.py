"""All clients of a simulated job together."""

from __future__ import annotations

import asyncio

from tests.queue.chaos.process import Process
from tests.queue.chaos.rows import PlainRows
from tests.queue.chaos.training import TRAIN, Training
from transfer_queue.errors import NotFound


class Job(Training, PlainRows):
    """See Clients."""

    def start(self) -> None:
        spawn = self.world.spawn
        spawn("feeder", self.feeder)
        for i in range(3):
            spawn(f"generator-{i}", self.generator)
        spawn("trainer", self.trainer)
        for _ in range(self.random.choice([0, 0, 1, 2])):
            self.world.loop.call_later(self.random.uniform(2.0, 25.0), self.take_over)
        spawn("watcher", self.watcher)
        for i in self.written:
            spawn(f"writer-{i}", lambda process, i=i: self.writer(process, i))
            spawn(f"fetcher-{i}", self.fetcher)
        spawn("streamer", self.streamer)

    async def watcher(self, process: Process) -> None:
        client = await process.connect()
        seq = -1
        while not self.finished():
            try:
                changes = await client.watch(TRAIN, seq, wait=5.0)
            except NotFound:
                await asyncio.sleep(0.5)
                continue
            assert changes.seq >= seq or changes.snapshot, f"the watch went back from {seq} to {changes.seq}"
            seq = changes.seq
        await client.close()
