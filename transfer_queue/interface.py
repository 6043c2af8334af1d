"""The queue as a key-value store, for scripts and for programs written for TransferQueue.

    import transfer_queue as tq
    tq.init()
    tq.kv_batch_put(["a", "b"], "train", fields=tensordict, tags=[{"status": "success"}, {}])
    batch = tq.kv_batch_get(["a", "b"], "train", select_fields=["responses"])     # a TensorDict
    tq.close()

Each process has one client, with an event loop of its own. A verb and its twin `async_...` are one coroutine on that
loop: the plain verb waits for it, from any thread; the twin may be awaited from any loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import msgspec

from transfer_queue import checkpoint
from transfer_queue.clients.arguments import names_of
from transfer_queue.clients.async_client import QueueClient
from transfer_queue.clients.parsers import parse
from transfer_queue.clients.parsers import register_data_parser as register_data_parser
from transfer_queue.clients.tags import plain_tags
from transfer_queue.clients.tensordicts import (
    batch_size,
    columns_of,
    columns_of_one,
    load,
    load_beside,
    tensordict_of,
    tensors_of,
)
from transfer_queue.errors import NotFound
from transfer_queue.keys import UNNAMED
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.net.messages import Located, Tag
from transfer_queue.service.attached import close as close
from transfer_queue.service.attached import get_client as get_client
from transfer_queue.service.attached import get_metrics_endpoint as get_metrics_endpoint
from transfer_queue.service.attached import init as init
from transfer_queue.storage.columns import Column

if TYPE_CHECKING:
    from os import PathLike

    from tensordict import TensorDict

    Fields = TensorDict | Mapping[str, Any]
    Names = Sequence[str] | str

P = ParamSpec("P")
R = TypeVar("R")

Verb = Callable[Concatenate[QueueClient, P], Coroutine[Any, Any, R]]


def _twins(verb: Verb[P, R], *, tensors: bool = False) -> tuple[Callable[P, R], Callable[P, Coroutine[Any, Any, R]]]:
    """The public functions of a coroutine on a client: one that waits, and one to await. `tensors`: it makes some, for
    which much is imported, here and not on the client's loop."""

    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        client = get_client()
        if tensors:
            load()
        return client.loop.run(verb(client.queue.client, *args, **kwargs))

    async def awaited(*args: P.args, **kwargs: P.kwargs) -> R:
        client = get_client()
        if tensors:
            await load_beside()
        return await client.loop.arun(verb(client.queue.client, *args, **kwargs))

    for function, name, doc in (
        (plain, verb.__name__.removeprefix("_"), verb.__doc__),
        (awaited, f"async{verb.__name__}", f"`{verb.__name__.removeprefix('_')}`, awaitable from any event loop."),
    ):
        functools.update_wrapper(function, verb)
        function.__name__ = function.__qualname__ = name
        function.__doc__ = doc
        function.__signature__ = _without_client(verb)  # pyright: ignore[reportFunctionMemberAccess]
    return plain, awaited


def _without_client(verb: Callable[..., Any]) -> Any:
    import inspect

    signature = inspect.signature(verb)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


# --- the verbs -----------------------------------------------------------------------------------------------------


async def _kv_put(
    client: QueueClient, key: str, partition_id: str, fields: Fields | None = None, tag: Tag | None = None,
    data_parser: str | None = None, *, wait: float | None = None,
) -> KVBatchMeta:  # fmt: skip
    """Upsert one row: a TensorDict of batch size 1, or a dict with one value per field. See kv_batch_put."""
    columns = parse(data_parser, columns_of_one(fields), 1)
    return await _put(client, [key], partition_id, columns, None if tag is None else [tag], wait)


async def _kv_batch_put(
    client: QueueClient, keys: Sequence[str], partition_id: str, fields: Fields | None = None,
    tags: Sequence[Tag] | None = None, data_parser: str | None = None, *, wait: float | None = None,
) -> KVBatchMeta:  # fmt: skip
    """Upsert fields of rows, and merge tags into theirs. Returns their merged tags and all fields they now have.

    Rows, fields and tags become visible together, or not at all. `data_parser` names a function that was registered
    with `register_data_parser`. Raises ValueError if lengths differ, keys repeat, or neither fields nor tags are given,
    and QueueFull if there is no room after `wait` seconds (60).
    """
    keys = names_of("keys", keys)
    rows = batch_size(fields)
    if rows is not None and rows != len(keys):
        raise ValueError(f"{len(keys)} keys but fields of batch size {rows}")
    columns = parse(data_parser, columns_of(fields), len(keys))
    return await _put(client, keys, partition_id, columns, tags, wait)


async def _kv_batch_get(
    client: QueueClient, keys: Names, partition_id: str, select_fields: Names | None = None, *, copy: bool = True
) -> TensorDict:
    """Rows in the order of the keys. Fields that not every row has, and rows that do not exist, are left out.

    With `copy` false, fields of rows that were put in this order are views, see QueueClient.get. Raises
    ValueError if none of the keys exists, or if they have no field in common.
    """
    names = _list(keys)
    _check_keys(names, partition_id)
    wanted = None if select_fields is None else set(_list(select_fields))

    async def locate() -> Located:
        try:
            located = await client.lookup(partition_id, names)
        except NotFound:
            located = None
        if located is None or not located.keys:
            raise ValueError(f"keys or partition were not found! partition {partition_id!r}, keys {names[:5]}")
        if not located.places:
            raise ValueError(f"rows {located.keys[:5]} of {partition_id!r} are not ready: they have no field in common")
        if wanted is None:
            return located
        return msgspec.structs.replace(located, places=[place for place in located.places if place.field in wanted])

    located, columns = await client.read_again(locate, copy=copy, mixed=tensors_of)
    return tensordict_of(columns, len(located.keys) if columns else 0)


async def _kv_batch_get_by_meta(
    client: QueueClient, meta: KVBatchMeta, select_fields: Names | None = None
) -> TensorDict:
    """The rows of `meta`. Raises ValueError for a selected field that it does not have."""
    if meta.partition_id is None:
        raise ValueError("the batch has no partition_id")
    selected = meta.fields if select_fields is None else _list(select_fields)
    missing = sorted(set(selected or []) - set(meta.fields or []))
    if missing:
        raise ValueError(f"select_fields {missing} not found in the batch, which has {meta.fields}")
    return await _kv_batch_get(client, meta.keys, meta.partition_id, selected)


async def _kv_list(client: QueueClient, partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
    """Tags by key by partition, keys in the order in which they came; of all partitions if none is given."""
    if partition_id is not None:
        _check_partition(partition_id)
    try:
        return await client.list(partition_id)
    except NotFound:
        return {}


async def _kv_clear(client: QueueClient, keys: Names, partition_id: str) -> None:
    """Remove rows; unknown keys and partitions are ignored. Raises ValueError for no keys at all."""
    names = _list(keys)
    _check_keys(names, partition_id)
    try:
        await client.clear(partition_id, names)
    except NotFound:
        return


async def _save_checkpoint(
    client: QueueClient, checkpoint_dir: str | PathLike[str], *, include_storage: bool = True,
    metadata: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write all plain rows to a new directory: keys, tags and what tasks consumed, with `include_storage` their fields
    too. `metadata` (plain values) is kept with them. The format, and what is atomic: transfer_queue.checkpoint."""
    await checkpoint.save(client, checkpoint_dir, include_storage=include_storage, metadata=metadata)


async def _load_checkpoint(client: QueueClient, checkpoint_dir: str | PathLike[str]) -> None:
    """Put back the rows of a checkpoint: its partitions are as they were, in place of those of the same names.

    All happens or nothing. Raises Invalid if there is no checkpoint, Corrupt if it is damaged.
    """
    await checkpoint.load(client, checkpoint_dir)


kv_put, async_kv_put = _twins(_kv_put)
kv_batch_put, async_kv_batch_put = _twins(_kv_batch_put)
kv_batch_get, async_kv_batch_get = _twins(_kv_batch_get, tensors=True)
kv_batch_get_by_meta, async_kv_batch_get_by_meta = _twins(_kv_batch_get_by_meta, tensors=True)
kv_list, async_kv_list = _twins(_kv_list)
kv_clear, async_kv_clear = _twins(_kv_clear)
save_checkpoint, async_save_checkpoint = _twins(_save_checkpoint)
load_checkpoint, async_load_checkpoint = _twins(_load_checkpoint)


# --- arguments ---------------------------------------------------------------------------------------------------


async def _put(
    client: QueueClient,
    keys: list[str],
    partition: str,
    columns: dict[str, Column],
    tags: Sequence[Tag] | None,
    wait: float | None,
) -> KVBatchMeta:
    _check_keys(keys, partition)
    for field in columns:
        if not isinstance(field, str):
            raise TypeError(f"field names are strings, got {field!r}")
    if not columns and tags is None:
        raise ValueError("give fields, tags, or both")
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"{len(keys)} keys but {len(tags)} tags")
    return await client.put(partition, keys, columns, tags=None if tags is None else plain_tags(keys, tags), wait=wait)


def _check_keys(keys: list[str], partition: str) -> None:
    _check_partition(partition)
    if not keys:
        raise ValueError("give at least one key")
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"keys are strings, got {key!r}")
        if key.startswith(UNNAMED):
            raise ValueError(f"key {key!r} begins with a NUL; such keys are the queue's own")


def _check_partition(partition: str) -> None:
    if isinstance(partition, str) and partition.startswith(UNNAMED):
        raise ValueError(f"partition {partition!r} begins with a NUL; such partitions are the queue's own")


def _list(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else names_of("keys and fields", names)
