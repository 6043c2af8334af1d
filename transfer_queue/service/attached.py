"""What this process has of the queue: its client, and the service if it started it.

A queue is found, in this order: by TQ_ADDRESS or TQ_DIRECTORY in the environment (children inherit TQ_ADDRESS from the
process that started it), by `address` or a `directory` with a living service in `init`'s conf, and if Ray is started
here by the actor named TransferQueueController or as the one RayQueue of the cluster (with `directory`: the one in it).
Only if there is none is one started (on every node of a Ray cluster that has several), and only who started it ends it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfer_queue.clients.batch_client import TransferQueueClient
from transfer_queue.clients.sync_client import SyncQueueClient
from transfer_queue.errors import DeadlineExceeded, Disconnected, QueueClosed
from transfer_queue.net.addresses import ADDRESS_VARIABLE, DIRECTORY_VARIABLE, parse_address
from transfer_queue.net.ending import ANONYMOUS, why_ended
from transfer_queue.service.queue_service import QueueService, read_address
from transfer_queue.service.ray_address import RayAddress, spans_nodes
from transfer_queue.service.ray_queue import RayQueue
from transfer_queue.settings import QueueSettings, differing, read_settings
from transfer_queue.storage.private import open_regular, private_directory
from transfer_queue.storage.unit_files import lock_within, try_lock

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from transfer_queue.operations.metrics_server import MetricsServer

log = logging.getLogger(__name__)

INIT_WAIT = 30.0
"""Seconds that `init` waits for a process that is starting a queue in the same directory: a service starts in one, or
gives up after twenty."""


class NoQueue(Disconnected, AssertionError):
    """This process knows of no queue. An AssertionError too, as programs for TransferQueue expect."""

    code = "no_queue"


class _Process:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.client: TransferQueueClient | None = None
        self.service: QueueService | RayQueue | None = None
        self.temporary: str | None = None
        self.ray: RayAddress | None = None
        self.metrics: MetricsServer | None = None
        self.address: dict[str, str] = {}
        self.settings: QueueSettings | None = None  # of the first `init`
        self.told: set[str] = set()  # settings of later ones that were warned of


_process = _Process()


def init(conf: Mapping[str, Any] | None = None) -> DictConfig:
    """Attach to the queue there is; else start one as `conf` says.

    `conf` (dict or DictConfig) may hold `directory`, `storage_dir`, `units`, `unit_budget_bytes`, `spill_dir`,
    `spill_budget_bytes`, `segment_bytes`, `fsync`, `address`, and TransferQueue's own tree (`controller.sampler`,
    `controller.polling_mode`, `metrics.enabled`, ...). Returns `conf` as a DictConfig with the `address` of the queue.
    A second call changes nothing, and warns once of settings that differ. Raises Invalid for a bad value, Disconnected
    if the queue that is named does not answer.
    """
    with _process.lock:
        if _process.client is not None:
            _warn_of_other(read_settings(conf, quiet=True))
            return _answer(conf)
        settings = _process.settings = read_settings(conf)
        address = _find(settings)
        if address is not None:
            _attach(address)
            return _answer(conf)
        with _only_one(settings.directory):
            address = _served(settings.directory)
            if address is not None:
                _attach(address)
            else:
                _start(settings)
            return _answer(conf)


def close() -> None:
    """Close this process' client, and end the queue if this process started it. A second call does nothing."""
    # Each is ended, the last one first, though a Ctrl-C ends the wait for another.
    with _process.lock, ExitStack() as ending:
        if _process.temporary is not None:
            ending.callback(shutil.rmtree, _process.temporary, ignore_errors=True)
        if _process.service is not None:
            ending.callback(_process.service.stop, clean=_process.temporary is not None)
            if os.environ.get(ADDRESS_VARIABLE) == json.dumps(_process.address):
                del os.environ[ADDRESS_VARIABLE]
        if _process.ray is not None:
            ending.callback(_process.ray.withdraw)
        if _process.client is not None:
            ending.callback(_process.client.close)
        if _process.metrics is not None:
            ending.callback(_process.metrics.close)
        _process.metrics = _process.client = _process.ray = _process.service = _process.temporary = None


def get_client() -> TransferQueueClient:
    """This process' client; attaches if there is a queue, again if another one came after the end of the first. Raises
    NoQueue (an AssertionError) if there is none, QueueClosed if there is none any more."""
    client = _process.client
    if client is not None and not client.queue.client.ended:
        return client
    with _process.lock:
        if _process.client is not None and _process.service is None and _process.client.queue.client.ended:
            ended = _process.address
            try:
                address = _find(QueueSettings(), but=ended)
            except Disconnected:  # a directory that holds none yet, say
                address = None
            if address is None:
                raise QueueClosed(f"{why_ended(ended) or 'the queue has ended'}; no other one is there")
            _process.client.close()
            _process.client = None
            _attach(address)
        if _process.client is None:
            address = _find(QueueSettings())
            if address is None:
                raise NoQueue(
                    f"no queue in this process: call transfer_queue.init(), or set {ADDRESS_VARIABLE} (children of the "
                    f"process that called it have it) or {DIRECTORY_VARIABLE}"
                )
            _attach(address)
        assert _process.client is not None
        return _process.client


def get_metrics_endpoint() -> str | None:
    """ "host:port" where this process serves Prometheus metrics of the queue, to who brings the key that lies in
    metrics.key in the queue's directory; None unless `metrics.enabled`."""
    return _process.metrics.endpoint if _process.metrics is not None else None


def queue_directory() -> Path | None:
    """Where the queue that this process has started or attached to keeps its files, if that is on this machine."""
    key_file = _process.address.get("key_file") if _process.client is not None else None
    directory = Path(key_file).parent if key_file else None
    return directory if directory is not None and (directory / "run.json").exists() else None


# --- finding -----------------------------------------------------------------------------------------------------


def _warn_of_other(settings: QueueSettings) -> None:
    """A later `init` changes nothing of the queue that is there."""
    other = [text for text in differing(settings, _process.settings or QueueSettings()) if text not in _process.told]
    if other:
        _process.told.update(other)
        log.warning("init: this process has a queue already, so these settings have no effect: %s", ", ".join(other))


def _find(settings: QueueSettings, but: dict[str, str] | None = None) -> dict[str, str] | None:
    """The address of a queue that is there already, and is not `but`."""
    text, directory = os.environ.get(ADDRESS_VARIABLE), os.environ.get(DIRECTORY_VARIABLE)
    if text and (address := parse_address(text)) != but:
        return address
    if settings.address is not None:
        return settings.address
    if directory and (address := read_address(directory)) != but:
        return address
    address = RayAddress.find(settings.directory)
    return address if address != but else None


def _served(directory: str | None) -> dict[str, str] | None:
    """The address of the service that lives in a directory, if one does."""
    lock = Path(directory, "service.lock") if directory is not None else None
    if lock is None or not lock.exists():
        return None
    with os.fdopen(open_regular(lock, os.O_RDWR), "rb+") as file:
        return None if try_lock(file.fileno()) else read_address(lock.parent)


@contextmanager
def _only_one(directory: str | None) -> Iterator[None]:
    """One process at a time looks whether a queue lives in a directory, and starts one. Its holder is as quick as a
    service starts or gives up, and a dead one holds it no longer. Raises DeadlineExceeded naming a stopped one."""
    if directory is None:
        yield
        return
    private_directory(directory)
    path = Path(directory, "init.lock")
    with os.fdopen(open_regular(path, os.O_RDWR | os.O_CREAT), "rb+", buffering=0) as file:
        if not lock_within(file.fileno(), INIT_WAIT):
            holder = os.pread(file.fileno(), 20, 0).decode(errors="replace").strip() or "?"
            raise DeadlineExceeded(
                f"init waited {INIT_WAIT:g} s for process {holder}, which starts a queue in {directory} (it holds "
                f"{path}): let it go on if it is stopped (kill -CONT {holder}), or end it, and call init again"
            )
        os.ftruncate(file.fileno(), 0)
        os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)
        yield


# --- attaching and starting ----------------------------------------------------------------------------------------


def _attach(address: dict[str, str]) -> None:
    _process.client = TransferQueueClient(SyncQueueClient(address, f"kv-{os.getpid()}"))
    _process.address = address


def _start(settings: QueueSettings) -> None:
    """Start a queue that ends with this process; if another process of the same Ray cluster was quicker, use that."""
    book = RayAddress.offer()
    if settings.directory is None:
        _process.temporary = tempfile.mkdtemp(prefix="tq-kv-")
        Path(_process.temporary, ANONYMOUS).touch()
    try:
        home, options = settings.directory or f"{_process.temporary}", settings.service_options()
        if spans_nodes():
            _process.service = RayQueue(home, units_per_node=options.pop("units"), network=True, **options)
        else:
            _process.service = QueueService(home, **options)
        address = _process.service.start()
        winner = book.publish(address) if book is not None else address
        if winner != address:
            close()
            _attach(winner)
            return
        _process.ray = book
        os.environ[ADDRESS_VARIABLE] = json.dumps(address)
        _attach(address)
        if settings.metrics:
            from transfer_queue.operations.metrics import serve_metrics

            assert _process.client is not None
            restarts = _process.service.restarts if isinstance(_process.service, QueueService) else None
            _process.metrics = serve_metrics(_process.client.queue, settings.metrics_port, home, restarts)
    except BaseException:
        close()
        raise


def _answer(conf: Mapping[str, Any] | None) -> DictConfig:
    from omegaconf import OmegaConf

    return OmegaConf.merge(_merged(conf), {"address": _process.address, "metrics": _metrics_answer()})  # pyright: ignore


def _metrics_answer() -> dict[str, str | None]:
    served = _process.metrics
    return {"endpoint": None} if served is None else {"endpoint": served.endpoint, "key_file": str(served.key_file)}


def _merged(conf: Mapping[str, Any] | None) -> Any:
    """The conf without what a config cannot hold: samplers are named."""
    from omegaconf import OmegaConf

    from transfer_queue.sampler import sampler_spec

    if conf is None:
        return {}
    if type(conf).__module__.startswith("omegaconf"):
        return OmegaConf.create(OmegaConf.to_container(conf, resolve=True))  # pyright: ignore  # no struct any more
    tree = {key: dict(value) if isinstance(value, Mapping) else value for key, value in conf.items()}
    for holder in (tree, tree.get("controller")):
        if isinstance(holder, dict) and holder.get("sampler") is not None:
            holder["sampler"] = sampler_spec(holder["sampler"])
    plain = {str(key): str(v) if hasattr(v, "__fspath__") else v for key, v in tree.items()}
    return OmegaConf.create(plain, flags={"allow_objects": True})


def _forget_after_fork() -> None:
    """A forked child has neither the threads nor the sockets of its parent: it attaches anew."""
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(close)
