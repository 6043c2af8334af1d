"""TransferQueue's low-level client: rows by serial, consumed by tasks.

    client = tq.get_client()
    meta = client.put(tensordict, partition_id="train")                         # rows without keys
    meta = client.get_meta(["responses"], 64, "train", task_name="actor")       # waits for 64 rows, consumes them
    data = client.get_data(meta)
    client.put(tensordict_of_results, metadata=meta)
    client.clear_samples(meta)

Serials (`global_indexes`) name a row for ever. A BatchMeta whose rows were cleared raises StorageKeyNotFoundError, even
if rows of the same keys were put since. All errors are RuntimeErrors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np

from transfer_queue import checkpoint
from transfer_queue.clients import batch_work
from transfer_queue.clients.arguments import names_of
from transfer_queue.clients.sync_client import SyncQueueClient
from transfer_queue.clients.tensordicts import load_beside, tensordict_of
from transfer_queue.errors import Invalid, NotFound
from transfer_queue.keys import UNNAMED
from transfer_queue.metadata import BatchMeta
from transfer_queue.net.client_loop import ClientLoop
from transfer_queue.net.messages import Tag

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

Mode = Literal["fetch", "force_fetch", "insert"]

P = ParamSpec("P")
R = TypeVar("R")


class AsyncTransferQueueClient:
    """The verbs as coroutines, `async_...`; they may be awaited from any event loop, several at once.

    `controller_info` is the address of a queue, as TQ_ADDRESS has it.
    """

    def __init__(
        self, client_id: str, controller_info: Mapping[str, str] | None = None, zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
    ) -> None:  # fmt: skip
        """The last two are accepted and have no effect. Raises Invalid without an address."""
        if not isinstance(controller_info, Mapping):
            raise Invalid(
                f"controller_info is a {type(controller_info).__qualname__}; give the queue's address (a dict with "
                "run, socket and key_file), or use transfer_queue.get_client()"
            )
        self.queue = SyncQueueClient({str(k): str(v) for k, v in controller_info.items()}, client_id)

    @property
    def loop(self) -> ClientLoop:
        """Where `queue.client` lives."""
        return self.queue.loop

    def initialize_storage_manager(self, manager_type: str = "", config: Any = None) -> None:
        """Nothing to do here: storage is found through the controller."""

    def close(self) -> None:
        """End this client; a second call does nothing."""
        self.queue.close()

    # --- metadata ---------------------------------------------------------------------------------------------

    async def async_get_meta(
        self, data_fields: Sequence[str], batch_size: int | None, partition_id: str, mode: Mode = "fetch",
        task_name: str | None = None, sampling_config: Mapping[str, Any] | None = None, wait: float | None = None,
        drained: bool = False,
    ) -> BatchMeta:  # fmt: skip
        """Rows of a partition.

        "fetch": `batch_size` rows that have all `data_fields` and that `task_name` has not consumed, as the sampler
        chooses; they are consumed at once. Waits for them up to `wait` seconds, then raises DeadlineExceeded. None:
        with `polling_mode` not at all, an empty batch says that there were too few; else USUAL_WAIT. `drained`: an
        empty batch once the task has consumed all rows there are.
        "force_fetch": all rows, `production_status` telling which have the fields. Raises NotFound for no partition.
        "insert": `batch_size` new rows without fields.
        """
        if mode == "insert":
            return await self._arun(
                batch_work.insert(self.queue.client, partition_id, batch_work.count_of(batch_size), data_fields)
            )
        if mode == "force_fetch":
            return batch_work.batch(
                partition_id, await self._arun(self.queue.client.find_all(partition_id, data_fields))
            )
        if mode != "fetch":
            raise Invalid(f"mode={mode!r}; expected fetch, force_fetch or insert")
        if not task_name:
            raise Invalid("mode='fetch' needs a task_name: it is the task that consumes the rows")
        work = self.queue.client.fetch(
            partition_id,
            task_name,
            data_fields,
            batch_work.count_of(batch_size),
            sampling=sampling_config,
            wait=wait,
            drained=drained,
        )
        return batch_work.batch(partition_id, await self._arun(work))

    async def async_set_custom_meta(self, metadata: BatchMeta) -> None:
        """Merge the custom_meta of each row into the tags that the queue has of it. Raises StorageKeyNotFoundError."""
        for part in metadata.chunk_by_partition():
            await self._arun(batch_work.write(self.queue.client, part, {}, part.custom_meta))

    async def async_kv_retrieve_meta(
        self, keys: Sequence[str] | str, partition_id: str, create: bool = False
    ) -> BatchMeta:
        """The rows of keys, in their order, with the fields that all of them have. Missing keys are left out, or with
        `create` made. An unknown partition has no rows."""
        names = [keys] if isinstance(keys, str) else names_of("keys", keys)
        return await self._arun(batch_work.of_keys(self.queue.client, partition_id, names, create))

    async def async_kv_retrieve_keys(self, global_indexes: Sequence[int], partition_id: str) -> list[str | None]:
        """The keys of rows; None for a row that was put without one. Raises StorageKeyNotFoundError, NotFound."""
        rows = np.asarray(global_indexes, np.int64).reshape(-1)
        if not len(rows):
            return []
        found = await self._arun(self.queue.client.find(partition_id, rows=batch_work.packed(rows), fields=[]))
        return [None if key.startswith(UNNAMED) else key for key in found.keys]

    async def async_kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
        """Tags by key by partition."""
        try:
            return await self._arun(self.queue.client.list(partition_id))
        except NotFound:
            return {}

    async def async_get_partition_list(self) -> list[str]:
        """The names of all partitions."""
        return list(await self.async_kv_list())

    # --- data ---------------------------------------------------------------------------------------------------

    async def async_get_data(self, metadata: BatchMeta) -> TensorDict:
        """The rows of a batch with its fields, in its order; an empty TensorDict for an empty one.

        Raises StorageKeyNotFoundError if rows were cleared meanwhile, Invalid for a field that a row does not have.
        """
        await load_beside()
        if not metadata.size:
            return tensordict_of({}, 0)
        return await self._arun(batch_work.read(self.queue.client, metadata))

    async def async_put(
        self, data: TensorDict, metadata: BatchMeta | None = None, partition_id: str | None = None,
        data_parser: str | None = None,
    ) -> BatchMeta:  # fmt: skip
        """Write fields to the rows of `metadata`, or to new rows of `partition_id`. Returns the batch with them.

        `data_parser` names a registered function, see kv_batch_put. Raises StorageKeyNotFoundError if rows were cleared
        meanwhile (nothing is written then), Invalid for another batch size or without a partition.
        """
        return await self._arun(batch_work.put(self.queue.client, data, metadata, partition_id, data_parser))

    async def async_clear_samples(self, metadata: BatchMeta) -> None:
        """Remove the rows of a batch; those that are gone are no error."""
        for part in metadata.chunk_by_partition():
            await batch_work.unless_missing(
                self._arun(self.queue.client.clear_rows(part.partition_ids[0], batch_work.packed(part.indexes)))
            )

    async def async_clear_partition(self, partition_id: str) -> None:
        """Remove a partition with all rows; an unknown one is no error."""
        await batch_work.unless_missing(self._arun(self.queue.client.clear_partition(partition_id)))

    # --- who has what -------------------------------------------------------------------------------------------

    async def async_get_consumption_status(
        self, task_name: str, partition_id: str
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """(global indexes, int8 [rows]: 1 if the task has consumed it); (None, None) for an unknown partition."""
        await load_beside()
        rows = await batch_work.unless_missing(self._arun(self.queue.client.find_all(partition_id, [], task=task_name)))
        return (
            (None, None)
            if rows is None
            else (batch_work.indexes_of(rows), batch_work.flags_of([rows.consumed], len(rows.keys))[:, 0])
        )

    async def async_get_production_status(
        self, data_fields: Sequence[str], partition_id: str
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """(global indexes, int8 [rows, fields]: 1 if the row has it); (None, None) for an unknown partition."""
        await load_beside()
        rows = await batch_work.unless_missing(self._arun(self.queue.client.find_all(partition_id, data_fields)))
        return (
            (None, None)
            if rows is None
            else (batch_work.indexes_of(rows), batch_work.flags_of(rows.have, len(rows.keys)))
        )

    async def async_check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether the task has consumed all rows of the partition; not for an unknown one."""
        _, status = await self.async_get_consumption_status(task_name, partition_id)
        return status is not None and bool((status == 1).all())

    async def async_check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        """Whether all rows of the partition have all the fields; not for an unknown one."""
        _, status = await self.async_get_production_status(data_fields, partition_id)
        return status is not None and bool((status == 1).all())

    async def async_reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """The task (None: every task) has consumed nothing. False for an unknown partition."""
        work = self.queue.client.reset_consumption(partition_id, task_name)
        return await batch_work.unless_missing(self._arun(batch_work.true(work))) is True

    # --- checkpoints --------------------------------------------------------------------------------------------

    async def async_save_controller_checkpoint(self, path: str | PathLike[str]) -> None:
        """Write keys, tags and consumption, without fields. See save_checkpoint."""
        await self._arun(checkpoint.save(self.queue.client, path, include_storage=False))

    async def async_load_controller_checkpoint(self, path: str | PathLike[str]) -> None:
        """Put back what save_controller_checkpoint wrote."""
        await self._arun(checkpoint.load(self.queue.client, path))

    async def async_save_storage_checkpoint(self, path: str | PathLike[str]) -> None:
        """Write keys, tags and consumption with all fields: bytes without their rows are of no use here."""
        await self._arun(checkpoint.save(self.queue.client, path))

    async def async_load_storage_checkpoint(self, path: str | PathLike[str]) -> None:
        """Put back what save_storage_checkpoint wrote."""
        await self._arun(checkpoint.load(self.queue.client, path))

    async def _arun(self, work: Coroutine[Any, Any, R]) -> R:
        return await self.queue.loop.arun(work)


def _plain(
    verb: Callable[Concatenate[AsyncTransferQueueClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[AsyncTransferQueueClient, P], R]:
    """The method that waits for a coroutine method."""

    @functools.wraps(verb)
    def method(self: AsyncTransferQueueClient, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.queue.loop.run(verb(self, *args, **kwargs))

    method.__name__ = verb.__name__.removeprefix("async_")
    method.__qualname__ = f"TransferQueueClient.{method.__name__}"
    method.__signature__ = inspect.signature(verb)  # pyright: ignore[reportAttributeAccessIssue]
    return method


class TransferQueueClient(AsyncTransferQueueClient):
    """The verbs of AsyncTransferQueueClient, and each without `async_` as a method that waits, from any thread.

    `queue` is the same client with our own verbs: leases, credit, watches.
    """

    def __init__(
        self, client_id: str | SyncQueueClient, controller_info: Mapping[str, str] | None = None,
        zmq_io_threads: int | None = None, zmq_max_sockets: int | None = None,
    ) -> None:  # fmt: skip
        if isinstance(client_id, SyncQueueClient):
            self.queue = client_id
        else:
            super().__init__(client_id, controller_info, zmq_io_threads, zmq_max_sockets)

    get_meta = _plain(AsyncTransferQueueClient.async_get_meta)
    set_custom_meta = _plain(AsyncTransferQueueClient.async_set_custom_meta)
    kv_retrieve_meta = _plain(AsyncTransferQueueClient.async_kv_retrieve_meta)
    kv_retrieve_keys = _plain(AsyncTransferQueueClient.async_kv_retrieve_keys)
    kv_list = _plain(AsyncTransferQueueClient.async_kv_list)
    get_partition_list = _plain(AsyncTransferQueueClient.async_get_partition_list)
    get_data = _plain(AsyncTransferQueueClient.async_get_data)
    put = _plain(AsyncTransferQueueClient.async_put)
    clear_samples = _plain(AsyncTransferQueueClient.async_clear_samples)
    clear_partition = _plain(AsyncTransferQueueClient.async_clear_partition)
    get_consumption_status = _plain(AsyncTransferQueueClient.async_get_consumption_status)
    get_production_status = _plain(AsyncTransferQueueClient.async_get_production_status)
    check_consumption_status = _plain(AsyncTransferQueueClient.async_check_consumption_status)
    check_production_status = _plain(AsyncTransferQueueClient.async_check_production_status)
    reset_consumption = _plain(AsyncTransferQueueClient.async_reset_consumption)
    save_controller_checkpoint = _plain(AsyncTransferQueueClient.async_save_controller_checkpoint)
    load_controller_checkpoint = _plain(AsyncTransferQueueClient.async_load_controller_checkpoint)
    save_storage_checkpoint = _plain(AsyncTransferQueueClient.async_save_storage_checkpoint)
    load_storage_checkpoint = _plain(AsyncTransferQueueClient.async_load_storage_checkpoint)
