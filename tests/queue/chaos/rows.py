"""The clients of plain rows in a simulated job: writers that read and clear what is theirs, and one whose rows two
others fetch, each once."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np

from tests.queue.chaos.clients import Clients
from tests.queue.chaos.process import Process
from tests.queue.chaos.record import digest
from transfer_queue.client import QueueClient
from transfer_queue.errors import DeadlineExceeded, NotFound

PLAIN, STREAM = "plain", "stream"

DURABLE = "durable"
"""As PLAIN, with durability "journal"."""

DURABLE_WRITERS = ("w1",)
"""Beginnings of the keys of writers whose rows lie there."""

STREAMED = 24
"""Rows that are put once and fetched once, two at a time."""


def partition_of(key: str) -> str:
    """Where a writer's row is."""
    return DURABLE if key.startswith(DURABLE_WRITERS) else PLAIN


class PlainRows(Clients):
    """Rows without groups."""

    # --- plain rows ------------------------------------------------------------------------------------------------

    async def writer(self, process: Process, number: int) -> None:
        """Writes, reads and clears keys that are its own."""
        client = await process.connect()
        keys = [f"w{number}k{i}" for i in range(self.keys)]
        if self.durability or partition_of(keys[0]) == DURABLE:
            await client.open_partition(partition_of(keys[0]), tasks=[], durability="journal")
        while self.written[number] < self.rounds:
            some = sorted(self.random.sample(keys, self.random.randrange(1, 4)))
            luck = self.random.random()
            if luck < 0.55:
                await self._write(process, client, some)
            elif luck < 0.7:
                with contextlib.suppress(NotFound):
                    async with self._attempt(process, some, [None] * len(some)):
                        await client.clear(partition_of(some[0]), some)
            else:
                await self.check_plain(client, some)
            self.written[number] += 1
            await asyncio.sleep(self.random.uniform(0.0, 1.0))
        await client.close()

    async def _write(self, process: Process, client: QueueClient, keys: list[str]) -> None:
        big = self.random.random() < 0.05
        values = [self._bytes(120_000 if big else 3000) for _ in keys]
        digests: list[str | None] = [digest(value) for value in values]
        tags = [{"digest": found} for found in digests]
        async with self._attempt(process, keys, digests):
            await client.put(partition_of(keys[0]), keys, {"v": values}, tags=tags)

    async def check_plain(self, client: QueueClient, keys: list[str]) -> None:
        """All that was acknowledged is there, with the bytes and tags of one write."""
        for key in keys:
            try:
                located, got = await client.read_again(lambda key=key: client.lookup(partition_of(key), [key]))
            except NotFound:
                located, got = None, None
            if located is None or got is None or not located.keys:
                found = None
            else:
                found = digest(got["v"].rows_list()[0])
                assert located.tags[0]["digest"] == found, f"I10: {key} has the tags of another write"
            allowed = self.record.register(key).allowed(self.world.loop.time())
            allowed |= {None} if self.world.losses else set()
            assert found in allowed, f"{key}: {'lost' if found is None else 'other bytes'}; allowed {allowed}"
            self.record.reads += 1

    # --- rows that are consumed ----------------------------------------------------------------------------------

    async def streamer(self, process: Process) -> None:
        client = await process.connect()
        if self.durability:
            await client.open_partition(STREAM, tasks=[], durability=self.durability)
        for i in range(0, STREAMED, 2):
            keys = [f"s{i}", f"s{i + 1}"]
            if self.record.register(keys[0]).acknowledged():
                continue
            values = [np.full(20, int(key[1:])) for key in keys]
            async with self._attempt(process, keys, [digest(value) for value in values]):
                await client.put(STREAM, keys, {"v": values})
            await asyncio.sleep(self.random.uniform(0.0, 0.5))
        await client.close()

    async def fetcher(self, process: Process) -> None:
        """Nobody gets what another one got; what a death takes is gone."""
        client = await process.connect()
        while not self.drained:
            heard, streamed = False, self._streamed()
            try:
                rows = await client.fetch(STREAM, "read", ["v"], 2, wait=2.0, drained=True)
                heard = True
            except DeadlineExceeded:
                self.drained = self.world.losses > 0 and streamed  # one row may be left
                heard = True
                continue
            except NotFound:  # they were lost before their answer came
                assert self.world.losses, "rows that were fetched are gone"
                continue
            finally:
                self.unheard += not heard
            again = set(rows.keys) & set(self.fetched)
            assert not again or self.world.losses, f"{sorted(again)} were fetched twice"
            self.fetched += rows.keys
            self.drained = not rows.keys and streamed
            await asyncio.sleep(self.random.uniform(0.0, 0.5))
        await client.close()

    def _streamed(self) -> bool:
        return self.record.register(f"s{STREAMED - 1}").acknowledged()
