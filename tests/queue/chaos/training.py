"""The clients that train in a simulated job: a feeder, generators, trainers.

Each keeps what it knows in the ClientRecord, checks what it reads against it, and goes on from it after its death.
"""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np

from tests.queue.chaos.clients import Clients
from tests.queue.chaos.process import Process
from tests.queue.chaos.record import digest
from transfer_queue.client import QueueClient
from transfer_queue.errors import Conflict, DeadlineExceeded, Fenced, NotFound, QueueFull, SegmentGone
from transfer_queue.keys import row_key
from transfer_queue.ledger.groups import PROMPT_LOST
from transfer_queue.net.messages import Group, GroupSpec, Leased, SessionClose, TaskSpec, Token

TRAIN = "train"

TTL = 6.0

TASKS = [
    TaskSpec("generate", "prompt", "clock", TTL, max_deliver=10_000),
    TaskSpec("train", "rows", "incarnation", fields=["x", "o"], max_deliver=10_000),
]


class Training(Clients):
    """Groups, from the prompt to the checkpoint."""

    # --- feeder ------------------------------------------------------------------------------------------------

    async def feeder(self, process: Process) -> None:
        client = await process.connect()
        await client.open_partition(TRAIN, tasks=TASKS, max_groups=6, durability=self.durability)
        while not self.finished():
            some = await self._to_admit(client)
            if not some:
                await asyncio.sleep(2.0)
                continue
            specs = [GroupSpec(uid, self.sizes[uid], int(uid[1:])) for uid in some]
            prompts = [f"what is {uid}?" for uid in some]
            images = [np.frombuffer(uid.encode() * 40, np.uint8) for uid in some]
            for uid, prompt, image in zip(some, prompts, images, strict=True):
                self.record.prompts[uid] = digest(prompt, image)
            with contextlib.suppress(QueueFull, DeadlineExceeded):
                await client.admit(TRAIN, specs, {"raw_prompt": prompts, "image": images}, wait=2.0)
                self.record.groups |= {uid: self.sizes[uid] for uid in some}
        await client.close()

    async def _to_admit(self, client: QueueClient) -> list[str]:
        """Prompts that were lost with a unit, else the next ones."""
        groups = (await client.watch(TRAIN, -1)).groups
        lost = [group.uid for group in groups if (group.state, group.reason) == ("pending", PROMPT_LOST)]
        return (lost or [uid for uid in self.sizes if uid not in self.record.groups])[:2]

    # --- generators ----------------------------------------------------------------------------------------------

    async def generator(self, process: Process) -> None:
        client = await process.connect()
        while not self.finished():
            try:
                leased = await client.lease(TRAIN, "generate", groups=self.random.randrange(1, 3), wait=5.0)
            except DeadlineExceeded:
                continue
            self.record.granted(leased.token)
            with contextlib.suppress(Fenced, Conflict, NotFound):
                await self._generate(process, client, leased)
        await client.close()

    async def _generate(self, process: Process, client: QueueClient, leased: Leased) -> None:
        uids = [group.uid for group in leased.groups]
        got = await client.get(TRAIN, uids, ["raw_prompt", "image"])
        for uid, prompt, image in zip(uids, got["raw_prompt"].rows_list(), got["image"].rows_list(), strict=True):
            assert digest(prompt, image) == self.record.prompts[uid], f"I10: the prompt of {uid} is another one"
        self.record.reads += len(uids)
        luck = self.random.random()
        if luck < 0.05:
            return await client.nack(TRAIN, leased.token, uids, reason="no time")
        if luck < 0.12:
            await asyncio.sleep(2 * TTL)  # stopped, and goes on as if nothing had happened
        for group in leased.groups:
            for session in sorted(set(range(group.n)) - set(group.sessions)):
                await asyncio.sleep(self.random.uniform(0.0, 0.7 * TTL))
                await client.renew(TRAIN, leased.token)
                await self._finish(process, client, leased.token, group, session)

    async def _finish(self, process: Process, client: QueueClient, token: Token, group: Group, session: int) -> None:
        """The rows of a session, its end and their tags, in one commit."""
        rows = self.random.randrange(1, 3)
        keys = [row_key(group.uid, session, i) for i in range(rows)]
        values = [self._bytes() for _ in keys]
        objects = [{"at": self.world.loop.time(), "by": process.name, "i": i} for i in range(rows)]
        whole = digest(*values, *objects)
        tags = [{"max_global_steps": self.version, "digest": digest(*row)} for row in zip(values, objects, strict=True)]
        async with self._attempt(process, [(group.uid, session)], [whole]):
            await client.put(
                TRAIN, keys, {"x": values, "o": objects}, tags=tags, token=token,
                closes=[SessionClose(group.uid, session, keys)],
            )  # fmt: skip

    # --- trainer -------------------------------------------------------------------------------------------------

    async def trainer(self, process: Process) -> None:
        """The last one that was started has the checkpoints; those before may still live, and must get nothing."""
        client = await process.connect("trainer")
        self.trainers += 1
        mine = self.trainers
        while not self.finished() and mine == self.trainers:
            step = self.record.restored()
            try:
                incarnation = (await client.open_trainer(TRAIN, step)).incarnation
            except NotFound:  # the feeder has not opened the partition yet
                await asyncio.sleep(0.1)
                continue
            self.opened = max(self.opened, incarnation)
            with contextlib.suppress(Fenced):
                while not self.finished():
                    step += await self._step(client, step + 1, mine, incarnation)
        await client.close()

    def take_over(self) -> None:
        """Start a trainer beside the one that is there, as if that one were dead."""
        if not self.world.quiet:
            self.world.spawn(f"trainer-{self.trainers}", self.trainer)

    def _still(self, mine: int) -> None:
        """A trainer that was replaced finds the run's directory locked."""
        if mine != self.trainers:
            raise Fenced("another trainer has the checkpoints")

    async def _step(self, client: QueueClient, step: int, mine: int, incarnation: int) -> int:
        """Whether the step was done."""
        late = self.opened > incarnation
        try:
            leased = await client.lease(TRAIN, "train", groups=2, wait=5.0)
            assert not late, "a trainer that was replaced got a lease"
            self._still(mine)
        except DeadlineExceeded:
            assert not late, "a trainer that was replaced was let wait"
            if not self.record.acked:
                return 0
            leased = None
        if leased is not None:
            self.record.granted(leased.token)
            uids = [group.uid for group in leased.groups]
            self.record.delivered(uids)
            try:
                for group in leased.groups:
                    await self._check(client, group)
            except (NotFound, SegmentGone):
                self._still(mine)
                assert self.world.losses, "rows of a leased group are gone"
                with contextlib.suppress(Fenced):
                    await client.nack(TRAIN, leased.token, uids, reason="rows lost")
                return 0
            if self.random.random() < 0.1:
                await client.nack(TRAIN, leased.token, uids, reason="another time")
                return 0
            try:
                await client.ack(TRAIN, leased.token, uids, step=step)
            except Fenced:
                if not self.world.losses:
                    raise
                with contextlib.suppress(Fenced):  # of those whose rows are still there
                    await client.nack(TRAIN, leased.token, uids, reason="rows lost")
                return 0
            self._still(mine)
            self.record.trained(step, uids)
            self.version = step
        self._still(mine)
        if leased is None or self.random.random() < 0.4:
            self.record.checkpointed(step)
            await client.commit_step(TRAIN, step)
        return 1

    async def _check(self, client: QueueClient, group: Group) -> None:
        """I9: whole; I10: what was written."""
        sessions: dict[int, list[str]] = {}
        for row in group.rows:
            uid, session, _ = row.key.rsplit("_", 2)
            assert uid == group.uid
            sessions.setdefault(int(session), []).append(row.key)
        assert sorted(sessions) == list(range(self.sizes[group.uid])), f"I9: {group.uid} came with {sorted(sessions)}"
        tags = {row.key: row.tag for row in group.rows}
        for session, keys in sessions.items():
            keys.sort()
            located, got = await client.read_again(lambda keys=keys: client.lookup(TRAIN, keys, ["x", "o"]))
            if located.keys != keys or located.tags != [tags[key] for key in keys]:
                raise NotFound(f"{keys} are gone, or others than those that were leased")
            values, objects = got["x"].rows_list(), got["o"].rows_list()
            rows = [digest(*row) for row in zip(values, objects, strict=True)]
            assert rows == [tag["digest"] for tag in located.tags], f"I10: {keys} and their tags differ"
            found = digest(*values, *objects)
            allowed = self.record.register((group.uid, session)).allowed(self.world.loop.time())
            assert found in allowed, f"I10: {keys} hold what nobody (or somebody else) wrote"
            self.record.reads += len(keys)
