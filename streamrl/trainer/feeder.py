"""Issues prompts: from the dataset into the queue, as far as the queue gives credit.

The queue bounds how many groups are outstanding; admission waits there until a group was trained or dropped.
The dispatch order of a prompt is its place in the endless sequence epoch 0, epoch 1, ... of shuffled datasets, so
the same order means the same prompt after any restart.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from agent_loop.rows import PROMPT_FIELDS
from agent_loop.session import SAMPLED_SESSIONS
from streamrl.monitor.events import EventLog
from transfer_queue.client import QueueClient
from transfer_queue.errors import DeadlineExceeded, QueueFull
from transfer_queue.keys import prompt_uid
from transfer_queue.net.messages import Group, GroupSpec

ADMIT_WAIT = 60.0
"""Seconds of one parked admission; full credit is no error, so the feeder just asks again."""


class PromptSource(Protocol):
    """What the feeder needs of a dataset (streamrl.data.PromptDataset)."""

    def __len__(self) -> int: ...

    def at(self, epoch: int, position: int) -> dict[str, Any]:
        """The row at `position` of the epoch's permutation, with its dataset index under "index"."""
        ...


@dataclass(frozen=True, slots=True)
class Prompts:
    """One admission: specs and the object columns of their prompt rows."""

    specs: list[GroupSpec]
    columns: dict[str, list[Any]]


def prompts_at(source: PromptSource, orders: list[int], n: int, *, baseline: bool = False) -> Prompts:
    """The prompts with these dispatch orders; `n` sessions each where a row has no "n" of its own. With `baseline`
    one more, which is greedy."""
    specs: list[GroupSpec] = []
    columns: dict[str, list[Any]] = {name: [] for name in PROMPT_FIELDS}
    for order in orders:
        epoch, position = divmod(order, len(source))
        row = source.at(epoch, position)
        sampled = int(row.get("n") or n)
        tag = {"index": row["index"]} | ({SAMPLED_SESSIONS: sampled} if baseline else {})
        specs.append(GroupSpec(prompt_uid(epoch, position), sampled + baseline, order, tag=tag))
        for name in PROMPT_FIELDS:
            columns[name].append(row.get(name))
    return Prompts(specs, columns)


class Feeder:
    """Consumes: the dataset. Produces: admitted groups. Waits for: credit. Woken by: the queue's answer to Admit.

    `allow` is a second, local credit: how many further prompts may be issued (None: no limit). `sync` gives it out
    step by step; the asynchronous modes leave the bound to the queue.
    """

    def __init__(
        self, client: QueueClient, source: PromptSource, *, partition: str, n: int, chunk: int, baseline: bool = False,
        events: EventLog | None = None,
    ) -> None:  # fmt: skip
        self.next_order = 0
        self._events = events or EventLog(None, "feeder")
        self._client = client
        self._source = source
        self._partition = partition
        self._n, self._baseline = n, baseline
        self._chunk = chunk
        self._allowed: int | None = None
        self._more = asyncio.Event()

    def allow(self, prompts: int | None) -> None:
        """Permit `prompts` further ones, or any number (None)."""
        self._allowed = None if prompts is None else (self._allowed or 0) + prompts
        self._more.set()

    async def run(self) -> None:
        """Feed until cancelled."""
        while True:
            while self._allowed == 0:
                self._more.clear()
                await self._more.wait()
            count = self._chunk if self._allowed is None else min(self._chunk, self._allowed)
            if await self._admit(list(range(self.next_order, self.next_order + count))):
                self.next_order += count
                if self._allowed is not None:
                    self._allowed -= count

    async def admit_again(self, groups: list[Group]) -> None:
        """Give back the prompts of groups whose prompt row was lost with a storage unit."""
        await self.admit_orders([group.order for group in groups])

    async def admit_orders(self, orders: list[int]) -> None:
        """Issue exactly these dispatch orders, whatever the cursor says."""
        for start in range(0, len(orders), self._chunk):
            chunk = orders[start : start + self._chunk]
            if not await self._admit(chunk):
                raise DeadlineExceeded(
                    f"prompts {chunk} could not be issued again: the queue gave no credit for {ADMIT_WAIT:g} s. Its "
                    "journal does not fit the checkpoint; start anew with trainer.resume_mode=disable"
                )

    async def _admit(self, orders: list[int]) -> bool:
        return await self._admit_prompts(prompts_at(self._source, orders, self._n, baseline=self._baseline))

    async def _admit_prompts(self, prompts: Prompts) -> bool:
        """Whether the queue gave credit for them."""
        try:
            with self._events.span("wait_credit"):
                await self._client.admit(self._partition, prompts.specs, prompts.columns, wait=ADMIT_WAIT)
        except QueueFull:
            return False
        return True
