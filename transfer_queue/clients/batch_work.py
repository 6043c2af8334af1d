"""What the verbs of the low-level client do on its loop, and how answers become metadata."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from transfer_queue.clients.arguments import names_of
from transfer_queue.clients.async_client import QueueClient
from transfer_queue.clients.tags import plain_tags
from transfer_queue.clients.tensordicts import columns_of, tensordict_of, tensors_of
from transfer_queue.errors import Invalid, NotFound
from transfer_queue.keys import unnamed_keys
from transfer_queue.metadata import BatchMeta
from transfer_queue.metadata.schema import schema_of
from transfer_queue.net.bounds import check_count
from transfer_queue.net.messages import Rows, Tag
from transfer_queue.storage.columns import Column

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

R = TypeVar("R")


# --- what runs on the client's loop ----------------------------------------------------------------------------


async def insert(client: QueueClient, partition: str, count: int, fields: Sequence[str]) -> BatchMeta:
    fields = names_of("data_fields", fields)
    keys = unnamed_keys(count)
    await client.put(partition, keys, {}, tags=[{}] * count)
    return batch(partition, await client.find(partition, keys=keys, fields=fields))


async def of_keys(client: QueueClient, partition: str, keys: list[str], create: bool) -> BatchMeta:
    if create:
        await client.put(partition, list(dict.fromkeys(keys)), {}, tags=[{}] * len(set(keys)))
    try:
        rows = await client.find(partition, keys=keys)
    except NotFound:
        return BatchMeta()
    return batch(partition, rows, only_common=True)


async def read(client: QueueClient, meta: BatchMeta) -> TensorDict:
    parts = meta.chunk_by_partition()
    read = [await _read_part(client, part) for part in parts]
    if len(parts) == 1:
        return tensordict_of(read[0], meta.size)
    names = np.asarray(meta.partition_ids)
    back = np.argsort(np.concatenate([np.flatnonzero(names == part.partition_ids[0]) for part in parts]))
    columns = {name: Column.concat([one[name] for one in read]).take(back) for name in read[0]}
    return tensordict_of(columns, meta.size)


async def _read_part(client: QueueClient, part: BatchMeta) -> dict[str, Column]:
    partition, serials, names = part.partition_ids[0], packed(part.indexes), part.field_names

    async def locate() -> Any:
        rows = await client.find(partition, rows=serials, fields=names, located=True)
        for schema, have in zip(rows.schema, rows.have, strict=True):
            if 0 in have:
                raise Invalid(
                    f"field {schema.field!r} is not there (yet) for {have.count(0)} of {part.size} rows of "
                    f"{partition!r}; fetch rows that have it, or select fields that all have"
                )
        return rows.located

    return (await client.read_again(locate, mixed=tensors_of))[1]


async def put(
    client: QueueClient, data: TensorDict, meta: BatchMeta | None, partition: str | None, parser: str | None
) -> BatchMeta:
    from transfer_queue.clients.parsers import parse

    rows = len(data)
    columns = parse(parser, columns_of(data), rows)
    if meta is None:
        if partition is None:
            raise Invalid("put needs a partition_id, or the metadata of rows to write to")
        keys = unnamed_keys(rows)
        await client.put(partition, keys, columns)
        meta = batch(partition, await client.find(partition, keys=keys, fields=[]))
        return meta.add_fields(data)
    if meta.size != rows:
        raise Invalid(f"fields of batch size {rows} for the metadata of {meta.size} rows")
    places = np.asarray(meta.partition_ids)
    for part in meta.chunk_by_partition():
        at = np.flatnonzero(places == part.partition_ids[0])
        mine = columns if part.size == rows else {name: column.take(at) for name, column in columns.items()}
        await write(client, part, mine, None)
    return meta.copy().add_fields(data)


async def write(client: QueueClient, part: BatchMeta, columns: Mapping[str, Any], tags: list[Tag] | None) -> None:
    """Fields or tags of rows of one partition, which must still be the ones that are meant."""
    partition, serials = part.partition_ids[0], packed(part.indexes)
    found = await client.find(partition, rows=serials, fields=[])
    plain = None if tags is None else plain_tags(found.keys, tags)
    await client.put(partition, found.keys, columns, tags=plain, rows=serials)


async def unless_missing(work: Coroutine[Any, Any, R]) -> R | None:
    """None if there is no such partition."""
    try:
        return await work
    except NotFound:
        return None


async def true(work: Coroutine[Any, Any, None]) -> bool:
    await work
    return True


# --- plain values --------------------------------------------------------------------------------------------------


def batch(partition: str, rows: Rows, *, only_common: bool = False) -> BatchMeta:
    """An answer as metadata; a row is ready if it has all the fields."""
    flags = [np.frombuffer(have, np.int8) for have in rows.have]
    known = [(schema, have) for schema, have in zip(rows.schema, flags, strict=True) if schema.dtype]
    if only_common:
        known = [(schema, have) for schema, have in known if have.all()]
        flags = [have for _, have in known]
    status = np.minimum.reduce(flags) if flags else np.zeros(len(rows.keys), np.int8)
    return BatchMeta(
        np.frombuffer(rows.rows, np.int64),
        [partition] * len(rows.keys),
        schema_of(schema for schema, _ in known),
        status,
        custom_meta=rows.tags,
    )


def packed(indexes: np.ndarray) -> bytes:
    return indexes.astype("<i8").tobytes()


def count_of(batch_size: int | None) -> int:
    return check_count("batch_size", batch_size)


def indexes_of(rows: Rows) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.frombuffer(rows.rows, np.int64).copy())


def flags_of(columns: Sequence[bytes], rows: int) -> torch.Tensor:
    """int8 [rows, columns]."""
    import torch

    return torch.from_numpy(np.frombuffer(b"".join(columns), np.int8).reshape(len(columns), rows).T.copy())
