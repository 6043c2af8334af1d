"""The client for code without an event loop: the ranks of a worker group, scripts, notebooks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from transfer_queue.clients.async_client import Queue, QueueClient
from transfer_queue.clients.dropped import close_when_dropped
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.net.client_loop import ClientLoop
from transfer_queue.net.messages import (
    Changes,
    GroupSpec,
    Leased,
    Located,
    QueueStats,
    Restored,
    SessionClose,
    Tag,
    TaskSpec,
    Token,
)  # fmt: skip
from transfer_queue.storage.columns import Column


class SyncQueueClient:
    """QueueClient's verbs, blocking. Any thread may call it, also several at once."""

    def __init__(
        self, address: Queue = None, name: str | None = None, *, timeout: float = 30.0, force_remote: bool | None = None
    ) -> None:
        """`address` and `name` as QueueClient.connect takes them, and what it raises."""
        self._loop = ClientLoop(f"queue-client-{name or os.getpid()}")
        try:
            self.client = self._loop.run(
                QueueClient.connect(address, name=name, timeout=timeout, force_remote=force_remote)
            )
        except BaseException:
            self._loop.close()
            raise
        self.name = self.client.name
        self._dropped = close_when_dropped(self, self.name, partial(_close_beside, self._loop, self.client))

    @property
    def loop(self) -> ClientLoop:
        """Where `client` lives, for callers that want to await its verbs from another loop."""
        return self._loop

    def open_partition(
        self, partition: str, *, tasks: Iterable[TaskSpec], max_groups: int = 0, max_bytes: int = 0,
        durability: Literal["", "memory", "spill", "journal"] = "",
    ) -> None:  # fmt: skip
        self._loop.run(
            self.client.open_partition(
                partition, tasks=tasks, max_groups=max_groups, max_bytes=max_bytes, durability=durability
            )
        )

    def admit(
        self, partition: str, groups: Sequence[GroupSpec], columns: Mapping[str, Any], *, wait: float = 60.0
    ) -> None:
        self._loop.run(self.client.admit(partition, groups, columns, wait=wait))

    def put(
        self, partition: str, keys: Sequence[str], columns: Mapping[str, Any], *, tags: list[Tag] | None = None,
        token: Token | None = None, closes: Sequence[SessionClose] = (), wait: float | None = None,
    ) -> KVBatchMeta:  # fmt: skip
        work = self.client.put(partition, keys, columns, tags=tags, token=token, closes=closes, wait=wait)
        return self._loop.run(work)

    def get(
        self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None, *, copy: bool = True
    ) -> dict[str, Column]:
        return self._loop.run(self.client.get(partition, keys, fields, copy=copy))

    def lookup(self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None) -> Located:
        return self._loop.run(self.client.lookup(partition, keys, fields))

    def list(self, partition: str | None = None) -> dict[str, dict[str, Tag]]:
        return self._loop.run(self.client.list(partition))

    def clear(self, partition: str, keys: Sequence[str]) -> None:
        self._loop.run(self.client.clear(partition, keys))

    def lease(
        self, partition: str, task: str, *, groups: int = 0, uids: Sequence[str] = (), wait: float = 60.0,
        holder: str | None = None,
    ) -> Leased:  # fmt: skip
        work = self.client.lease(partition, task, groups=groups, uids=uids, wait=wait, holder=holder)
        return self._loop.run(work)

    def renew(self, partition: str, token: Token) -> None:
        self._loop.run(self.client.renew(partition, token))

    def ack(self, partition: str, token: Token, uids: Sequence[str], *, step: int = 0) -> None:
        self._loop.run(self.client.ack(partition, token, uids, step=step))

    def nack(
        self, partition: str, token: Token, uids: Sequence[str], *, reason: str = "", poison: bool = False
    ) -> None:
        self._loop.run(self.client.nack(partition, token, uids, reason=reason, poison=poison))

    def drop(self, partition: str, uids: Sequence[str], reason: str) -> None:
        self._loop.run(self.client.drop(partition, uids, reason))

    def replay(self, partition: str, uids: Sequence[str]) -> None:
        self._loop.run(self.client.replay(partition, uids))

    def watch(self, partition: str, since: int, *, wait: float = 60.0) -> Changes:
        return self._loop.run(self.client.watch(partition, since, wait=wait))

    def open_trainer(self, partition: str, step: int) -> Restored:
        return self._loop.run(self.client.open_trainer(partition, step))

    def commit_step(self, partition: str, step: int) -> None:
        self._loop.run(self.client.commit_step(partition, step))

    def release_holder(self, holder: str, *, died: bool = True) -> None:
        self._loop.run(self.client.release_holder(holder, died=died))

    def stats(self, *, orders: bool = False, details: bool = False) -> QueueStats:
        return self._loop.run(self.client.stats(orders=orders, details=details))

    def close(self) -> None:
        """End this client; a second call does nothing."""
        self._dropped.detach()
        _close(self._loop, self.client)

    def __enter__(self) -> SyncQueueClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


for _name, _verb in vars(SyncQueueClient).items():
    if callable(_verb) and not _verb.__doc__ and not _name.startswith("_"):
        _verb.__doc__ = getattr(QueueClient, _name).__doc__


def _close(loop: ClientLoop, client: QueueClient) -> None:
    if loop.alive:
        try:
            loop.run(client.close())
        finally:
            loop.close()


def _close_beside(loop: ClientLoop, client: QueueClient) -> None:
    """In a thread: the garbage collector may be at work in that of the loop itself."""
    threading.Thread(target=_close, args=(loop, client), name=f"close-{loop.name}", daemon=True).start()
