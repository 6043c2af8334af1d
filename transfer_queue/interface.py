"""The queue as a key-value store, for scripts and for programs written for TransferQueue.

    import transfer_queue as tq
    tq.init()
    tq.kv_batch_put(["a", "b"], "train", fields=tensordict, tags=[{"status": "success"}, {}])
    batch = tq.kv_batch_get(["a", "b"], "train", select_fields=["responses"])     # a TensorDict
    tq.close()

The first process that calls `init` starts the queue and exports its address (TQ_ADDRESS), so that processes it starts
attach to the same one. Each process has one client, with an event loop of its own: the plain verbs block,
their async twins may be awaited from any loop.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from transfer_queue.errors import Disconnected, NotFound
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.net.messages import Located, Tag
from transfer_queue.service import QueueService
from transfer_queue.storage.columns import Column
from transfer_queue.sync_client import SyncQueueClient
from transfer_queue.tensordicts import batch_size, columns_of, columns_of_one, tensordict_of

if TYPE_CHECKING:
    from tensordict import TensorDict

ADDRESS_VARIABLE = "TQ_ADDRESS"
"""Environment variable with the address (JSON) of the queue that this process and its children use."""

_OWN = ("storage_dir", "units", "unit_budget_bytes", "segment_bytes", "fsync")


class _Process:
    """What this process has: a client, and the service if it is the one that started it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.client: SyncQueueClient | None = None
        self.service: QueueService | None = None
        self.temporary: str | None = None


_process = _Process()


def init(conf: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """Attach to the queue named by TQ_ADDRESS or by `conf["address"]`, and return `conf`; else start one.

    A queue started here takes from `conf` what QueueService takes (`directory`, `units`, `unit_budget_bytes`,
    `storage_dir`, ...; other keys are ignored), and the conf returned also holds its `address`. A second call
    does nothing.
    """
    with _process.lock:
        if _process.client is not None:
            return conf
        address = _known_address(conf)
        if address is None:
            conf = _start(dict(conf or {}))
            address = conf["address"]
        _process.client = SyncQueueClient(address, f"kv-{os.getpid()}")
        return conf


def close() -> None:
    """Close this process' client, and the queue if this process started it."""
    with _process.lock:
        if _process.client is not None:
            _process.client.close()
            _process.client = None
        if _process.service is not None:
            _process.service.stop(clean=_process.temporary is not None)
            _process.service = None
            os.environ.pop(ADDRESS_VARIABLE, None)
        if _process.temporary is not None:
            shutil.rmtree(_process.temporary, ignore_errors=True)
            _process.temporary = None


def get_client() -> SyncQueueClient:
    """This process' client; attaches if there is a queue. Raises Disconnected if there is none."""
    if _process.client is None:
        if _known_address(None) is None:
            raise Disconnected(f"no queue in this process: call transfer_queue.init(), or set {ADDRESS_VARIABLE}")
        init()
    assert _process.client is not None
    return _process.client


def kv_put(
    key: str, partition_id: str, fields: TensorDict | Mapping[str, Any] | None = None, tag: Tag | None = None
) -> KVBatchMeta:
    """Upsert one row: a TensorDict of batch size 1, or a dict with one value per field."""
    columns = columns_of_one(fields)
    return _run(_put([key], partition_id, columns, None if tag is None else [tag]))


async def async_kv_put(
    key: str, partition_id: str, fields: TensorDict | Mapping[str, Any] | None = None, tag: Tag | None = None
) -> KVBatchMeta:
    """`kv_put`, awaitable from any event loop."""
    columns = columns_of_one(fields)
    return await _arun(_put([key], partition_id, columns, None if tag is None else [tag]))


def kv_batch_put(
    keys: Sequence[str], partition_id: str, fields: TensorDict | Mapping[str, Any] | None = None,
    tags: list[Tag] | None = None,
) -> KVBatchMeta:  # fmt: skip
    """Upsert fields of rows, and merge tags into theirs. Returns their merged tags and all fields they now have.

    Raises ValueError if lengths differ, keys repeat, or neither fields nor tags are given.
    """
    return _run(_put(list(keys), partition_id, _columns(keys, fields), tags))


async def async_kv_batch_put(
    keys: Sequence[str], partition_id: str, fields: TensorDict | Mapping[str, Any] | None = None,
    tags: list[Tag] | None = None,
) -> KVBatchMeta:  # fmt: skip
    """`kv_batch_put`, awaitable from any event loop."""
    return await _arun(_put(list(keys), partition_id, _columns(keys, fields), tags))


def kv_batch_get(
    keys: Sequence[str] | str, partition_id: str, select_fields: Sequence[str] | str | None = None
) -> TensorDict:
    """Rows in the order of the keys. Fields that not every row has, and rows that do not exist, are left out.

    Raises ValueError if none of the keys exists, or if they have no field in common.
    """
    return _tensordict(*_run(_get(_list(keys), partition_id, select_fields)))


async def async_kv_batch_get(
    keys: Sequence[str] | str, partition_id: str, select_fields: Sequence[str] | str | None = None
) -> TensorDict:
    """`kv_batch_get`, awaitable from any event loop."""
    return _tensordict(*await _arun(_get(_list(keys), partition_id, select_fields)))


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: Sequence[str] | str | None = None) -> TensorDict:
    """The rows of `meta`. Raises ValueError for a selected field that it does not have."""
    return kv_batch_get(meta.keys, _partition(meta), _selected(meta, select_fields))


async def async_kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: Sequence[str] | str | None = None) -> TensorDict:
    """`kv_batch_get_by_meta`, awaitable from any event loop."""
    return await async_kv_batch_get(meta.keys, _partition(meta), _selected(meta, select_fields))


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
    """Tags by key by partition; of all partitions if none is given."""
    return _run(_list_keys(partition_id))


async def async_kv_list(partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
    """`kv_list`, awaitable from any event loop."""
    return await _arun(_list_keys(partition_id))


def kv_clear(keys: Sequence[str] | str, partition_id: str) -> None:
    """Remove rows; unknown ones are ignored. Raises ValueError for no keys at all."""
    _run(_clear(_list(keys), partition_id))


async def async_kv_clear(keys: Sequence[str] | str, partition_id: str) -> None:
    """`kv_clear`, awaitable from any event loop."""
    await _arun(_clear(_list(keys), partition_id))


# --- what runs on the client's loop ----------------------------------------------------------------------------


def _run(work: Any) -> Any:
    return get_client().loop.run(work)


async def _arun(work: Any) -> Any:
    return await get_client().loop.arun(work)


async def _put(keys: list[str], partition: str, columns: dict[str, Column], tags: list[Tag] | None) -> KVBatchMeta:
    _check_keys(keys)
    if not columns and tags is None:
        raise ValueError("give fields, tags, or both")
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"{len(keys)} keys but {len(tags)} tags")
    return await get_client().client.put(partition, keys, columns, tags=tags)


async def _get(
    keys: list[str], partition: str, select: Sequence[str] | str | None
) -> tuple[Located, dict[str, Column]]:
    _check_keys(keys)
    client = get_client().client
    wanted = None if select is None else set(_list(select))

    async def locate() -> Located:
        try:
            located = await client.lookup(partition, keys)
        except NotFound:
            located = None
        if located is None or not located.keys:
            raise ValueError(f"keys or partition were not found! partition {partition!r}, keys {keys[:5]}")
        if not located.places:
            raise ValueError(f"rows {located.keys[:5]} of {partition!r} are not ready: they have no field in common")
        places = [place for place in located.places if wanted is None or place.field in wanted]
        return msgspec.structs.replace(located, places=places)

    return await client.read_again(locate)


async def _list_keys(partition: str | None) -> dict[str, dict[str, Tag]]:
    try:
        return await get_client().client.list(partition)
    except NotFound:
        return {}


async def _clear(keys: list[str], partition: str) -> None:
    _check_keys(keys)
    try:
        await get_client().client.clear(partition, keys)
    except NotFound:
        return


# --- arguments ---------------------------------------------------------------------------------------------------


def _columns(keys: Sequence[str], fields: TensorDict | Mapping[str, Any] | None) -> dict[str, Column]:
    rows = batch_size(fields)
    if rows is not None and rows != len(keys):
        raise ValueError(f"{len(keys)} keys but fields of batch size {rows}")
    return columns_of(fields)


def _tensordict(located: Located, columns: dict[str, Column]) -> TensorDict:
    return tensordict_of(columns, len(located.keys) if columns else 0)


def _check_keys(keys: list[str]) -> None:
    if not keys:
        raise ValueError("give at least one key")
    wrong = next((key for key in keys if not isinstance(key, str)), None)
    if wrong is not None:
        raise TypeError(f"keys are strings, got {wrong!r}")


def _list(names: Sequence[str] | str) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _partition(meta: KVBatchMeta) -> str:
    if meta.partition_id is None:
        raise ValueError("the batch has no partition_id")
    return meta.partition_id


def _selected(meta: KVBatchMeta, select: Sequence[str] | str | None) -> list[str] | None:
    if select is None:
        return meta.fields
    missing = sorted(set(_list(select)) - set(meta.fields or []))
    if missing:
        raise ValueError(f"select_fields {missing} not found in the batch, which has {meta.fields}")
    return _list(select)


# --- starting ----------------------------------------------------------------------------------------------------


def _known_address(conf: Mapping[str, Any] | None) -> dict[str, str] | None:
    text = os.environ.get(ADDRESS_VARIABLE)
    if text:
        return json.loads(text)
    address = (conf or {}).get("address")
    return {str(name): str(value) for name, value in address.items()} if address else None


def _start(conf: dict[str, Any]) -> dict[str, Any]:
    """Start a queue that ends with this process."""
    if conf.get("directory") is None:
        _process.temporary = tempfile.mkdtemp(prefix="tq-kv-")
    options = {name: conf[name] for name in _OWN if conf.get(name) is not None}
    _process.service = QueueService(conf.get("directory") or f"{_process.temporary}", **options)
    address = _process.service.start()
    os.environ[ADDRESS_VARIABLE] = json.dumps(address)
    return {**conf, "address": address}


def _forget_after_fork() -> None:
    """A forked child has neither the threads nor the sockets of its parent: it attaches anew."""
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(close)
