"""The two verbs of the queue that a rank uses, and where they come from."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class RowStore(Protocol):
    """Blocking. `transfer_queue.client.SyncQueueClient` is one."""

    def get(self, partition: str, keys: list[str], fields: list[str] | None = None) -> Mapping[str, Any]:
        """Columns with one array per row (`column[i]`), in the order of the keys."""
        ...

    def put(
        self, partition: str, keys: list[str], columns: Mapping[str, Any], *,
        tags: list[dict[str, Any]] | None = None, token: Any = None,
    ) -> Any: ...  # fmt: skip

    def close(self) -> Any: ...


class NoRows:
    """Implements RowStore for workers that are only given rows (`held_rows`)."""

    def get(self, partition: str, keys: list[str], fields: list[str] | None = None) -> Mapping[str, Any]:
        raise RuntimeError("this worker has no queue to read references from; give it a DataProto")

    def put(
        self, partition: str, keys: list[str], columns: Mapping[str, Any], *,
        tags: list[dict[str, Any]] | None = None, token: Any = None,
    ) -> Any:  # fmt: skip
        raise RuntimeError("this worker has no queue to write to; give it a DataProto")

    def close(self) -> None: ...


class LoopStore:
    """An async `QueueClient` of another thread's event loop, for a rank in this process (`runtime=local`).

    Call it from any thread but the loop's own, which would wait for itself.
    """

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop, *, timeout: float = 60.0) -> None:
        self._client, self._loop, self._timeout = client, loop, timeout

    def get(self, partition: str, keys: list[str], fields: list[str] | None = None) -> Mapping[str, Any]:
        return self._wait("get", self._client.get(partition, keys, fields))

    def put(
        self, partition: str, keys: list[str], columns: Mapping[str, Any], *,
        tags: list[dict[str, Any]] | None = None, token: Any = None,
    ) -> Any:  # fmt: skip
        return self._wait("put", self._client.put(partition, keys, columns, tags=tags, token=token))

    def close(self) -> None:
        """The client belongs to who made it."""

    def _wait(self, verb: str, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self._timeout)
        except TimeoutError as error:
            future.cancel()
            raise TimeoutError(
                f"{verb}: the loop that holds the queue client did not answer in {self._timeout:g} s"
            ) from error


def connect(queue: dict[str, Any] | RowStore, name: str) -> RowStore:
    """A store from an address ({"run", "socket", "key_file"}); anything else is one already."""
    if not isinstance(queue, dict):
        return queue
    from transfer_queue.clients.sync_client import SyncQueueClient  # pyright: ignore

    return SyncQueueClient(queue, name)
