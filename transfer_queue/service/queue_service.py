"""A queue on this node: starts the controller and the storage units, and starts them again whenever they die.

    service = QueueService(run_directory / "queue", units=2)
    address = service.start()          # give it to QueueClient.connect, in any process on this node
    service.stop(clean=True)

What makes it survive: the controller's journal is in `directory`, the segments are in storage, and both processes hold
nothing else. So a killed process is simply started again, and a killed service is started again on its `directory`;
clients notice a pause. All children die with this process (also by SIGKILL).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transfer_queue.controller.absences import UNIT_LOST_AFTER
from transfer_queue.errors import Disconnected, Invalid
from transfer_queue.net.addresses import node_of
from transfer_queue.net.curve import check_ip, host_of
from transfer_queue.net.ending import CLOSED
from transfer_queue.net.loop import LoopThread
from transfer_queue.net.sockets import MAX_IPC_PATH
from transfer_queue.net.transport import MIN_KEY, read_key
from transfer_queue.sampler import load_sampler
from transfer_queue.service.supervisor import Child, Supervisor
from transfer_queue.storage.leftovers import PREFIX, remove_leftovers
from transfer_queue.storage.place import choose_spill, choose_storage
from transfer_queue.storage.private import private_directory, read_regular
from transfer_queue.storage.segments import check_segment_bytes
from transfer_queue.storage.spill import spill_arguments
from transfer_queue.storage.unit_files import lock_file, replace_file

log = logging.getLogger(__name__)

LOCK_WAIT = 2.0
"""Seconds to wait for a service on the same directory that was killed and is not wholly gone yet."""

_RUN_FIELDS = ("run", "storage", "sockets", "budget")


class QueueService:
    """See the module. Methods may be called from any thread; the supervision has an event loop of its own."""

    def __init__(
        self, directory: str | Path, *, storage_dir: str | Path | None = None, units: int = 2,
        unit_budget_bytes: int | None = None, segment_bytes: int = 8 << 20, key: bytes | None = None,
        spill_dir: str | Path | None = None, spill_budget_bytes: int | None = None,
        fsync: bool = False, bind: str | None = None, encrypt_bulk: bool = False,
        unit_lost_after: float = UNIT_LOST_AFTER, run: str | None = None,
        sampler: Mapping[str, Any] | None = None, polling: bool = False,
    ) -> None:  # fmt: skip
        """`directory` keeps journal, key and logs. `storage_dir` is where segments go (default: /dev/shm if it has the
        room, else the temporary directory). `spill_dir` is where each unit may move up to `spill_budget_bytes` of them
        when its memory is full (default: a part of the free disk, beside the journal; 0: none).

        `bind`: this node's IP, for clients and units of other nodes, who need the key file at the same path; requests
        are then encrypted (CURVE), bulk bytes authenticated, with `encrypt_bulk` encrypted too. Without it nothing
        listens that another node, or another user of this one, could reach.

        `run`: the name of a new queue (default: a random one); one that is there keeps its own.

        `unit_lost_after`: seconds that a storage unit may be away before its rows are given up and generated again.

        `sampler` (see sampler_spec) chooses the rows of fetches; with `polling`, one that finds too few gets none.

        Raises Invalid if something cannot work; nothing is started yet.
        """
        if bind is not None:
            check_ip(bind)
        if not unit_lost_after > 0:
            raise Invalid(f"unit_lost_after={unit_lost_after}: expected seconds, more than 0")
        if units < 1:
            raise Invalid(f"a queue needs at least one storage unit, got {units}")
        check_segment_bytes(segment_bytes)
        if key is not None and 2 * len(key) < MIN_KEY:
            raise Invalid(f"a key of {len(key)} bytes; give at least {MIN_KEY // 2}, or none to have one made")
        self.directory = Path(directory).absolute()
        self._units = units
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._fetching = ["--polling"] if polling else []
        if sampler is not None:
            load_sampler(sampler)
            self._fetching += ["--sampler", json.dumps(dict(sampler))]
        self._bind = bind
        self._unit_lost_after = unit_lost_after
        self._run = run
        self._bulk_scheme = "curve" if encrypt_bulk else "tcp"
        self._lock: int | None = None
        self._storage_lock: int | None = None
        self._spill_lock: int | None = None
        self._spill: Path | None = None
        known = read_run(self.directory)
        if known and Path(known["storage"]).is_dir():  # it was checked when it was chosen, and is partly full now
            parent, self._budget = Path(known["storage"]).parent, unit_budget_bytes or int(known["budget"])
        else:
            parent, self._budget = choose_storage(storage_dir, units, unit_budget_bytes)
        self._spill_parent = self.directory if spill_dir is None else Path(spill_dir).absolute()
        if known.get("spill"):  # rows may lie there
            self._spill_budget = int(known["spill_budget"]) if spill_budget_bytes is None else spill_budget_bytes
        else:
            self._spill_budget = choose_spill(self.directory, spill_dir, units, self._budget, spill_budget_bytes)
        self._prepare(known, parent, key)
        self.address = read_address(self.directory)
        self._supervisor = Supervisor([], self.directory)
        self._thread: LoopThread | None = None
        self._guard = threading.Lock()

    def start(self, timeout: float = 20.0) -> dict[str, str]:
        """Start all processes and return the address once they serve. Raises DeadlineExceeded, Disconnected."""
        with self._guard:
            if self._thread is not None:
                return self.address
            if self._budget < self._segment_bytes:
                raise Invalid(
                    f"unit_budget_bytes={self._budget} is less than one segment, segment_bytes={self._segment_bytes}: "
                    "nothing could be stored; give more, or smaller segments"
                )
            needed = [path for path in (self._storage, self._sockets, self._spill) if path is not None]
            if not all(path.is_dir() for path in needed):  # after a clean stop
                self._prepare(read_run(self.directory), self._storage.parent, None)
            read_key(self.address["key_file"])  # it may have been changed since
            try:
                self._lock = lock_file(self.directory / "service.lock", "a queue service", wait=LOCK_WAIT)
                self._storage_lock = lock_file(self._storage / "lock", "a queue service", wait=LOCK_WAIT)
                if self._spill is not None:
                    self._spill_lock = lock_file(self._spill / "lock", "a queue service", wait=LOCK_WAIT)
                (self.directory / CLOSED).unlink(missing_ok=True)
                self._thread = LoopThread("queue-service")
                self._supervisor = Supervisor(self._make_children(), self.directory)
                self._thread.run(self._supervisor.start(timeout))
            except BaseException:
                self._stop(clean=False)
                raise
            return self.address

    def stop(self, *, clean: bool = False) -> None:
        """End all processes. With `clean` the stored bytes go too; else a QueueService on this directory goes on."""
        with self._guard:
            self._stop(clean=clean)

    async def astart(self, timeout: float = 20.0) -> dict[str, str]:
        """`start` for callers with an event loop."""
        return await asyncio.to_thread(self.start, timeout)

    async def astop(self, *, clean: bool = False) -> None:
        """`stop` for callers with an event loop."""
        await asyncio.to_thread(lambda: self.stop(clean=clean))

    def pids(self) -> dict[str, int]:
        """Process ids by name: controller, unit-0, ... A process that is being restarted is left out."""
        alive = [child for child in self._supervisor.children if child.alive()]
        return {child.name: child.process.pid for child in alive if child.process is not None}

    def restarts(self) -> dict[str, int]:
        """How often each process was started again."""
        return {child.name: child.restarts for child in self._supervisor.children}

    async def __aenter__(self) -> QueueService:
        await self.astart()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.astop(clean=True)

    def __enter__(self) -> QueueService:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(clean=True)

    # --- directories -----------------------------------------------------------------------------------------

    def _prepare(self, known: dict[str, str], parent: Path, key: bytes | None) -> None:
        """Make or find again: run.json, key, the sockets' directory and the storage's."""
        private_directory(self.directory)
        remove_leftovers(parent)
        run = known.get("run") or self._run or secrets.token_hex(6)
        self._storage = parent / f"{PREFIX}{run}"
        private_directory(self._storage)
        replace_file(self._storage / "owner", str(self.directory))
        self._sockets = _sockets_directory(self.directory, known.get("sockets"))
        if not (self.directory / "key").exists() or key is not None:
            replace_file(self.directory / "key", (key or secrets.token_bytes(32)).hex())
        read_key(str(self.directory / "key"))
        description = {"run": run, "storage": str(self._storage), "sockets": str(self._sockets)}
        description["budget"] = str(self._budget)
        if known.get("spill") or self._spill_budget:
            self._spill = Path(known.get("spill") or self._spill_home(run))
            private_directory(self._spill)
            description |= {"spill": str(self._spill), "spill_budget": str(self._spill_budget)}
        if self._bind is not None:
            description["network"] = _network(self._bind, known.get("network"))
            description |= {"node": node_of(self._sockets), "bulk": self._bulk_scheme}
        replace_file(self.directory / "run.json", json.dumps(description))

    def _spill_home(self, run: str) -> Path:
        """In a directory that is not ours it says whose it is, as the storage does."""
        if self._spill_parent == self.directory:
            return self.directory / "spill"
        remove_leftovers(self._spill_parent)
        home = self._spill_parent / f"{PREFIX}{run}"
        private_directory(home)
        replace_file(home / "owner", str(self.directory))
        return home

    def _remove_storage(self) -> None:
        shutil.rmtree(self._storage, ignore_errors=True)
        if self._spill is not None:
            shutil.rmtree(self._spill, ignore_errors=True)
        shutil.rmtree(self._sockets, ignore_errors=True)

    # --- processes -------------------------------------------------------------------------------------------

    def _stop(self, *, clean: bool) -> None:
        thread, self._thread = self._thread, None
        try:
            if thread is not None:
                (self.directory / CLOSED).touch()  # clients that lose their connection now need not wait for it
                thread.run(self._supervisor.stop())
        finally:  # also if a second Ctrl-C ends the wait: with their thread the processes end
            self._let_go(thread, clean=clean)

    def _let_go(self, thread: LoopThread | None, *, clean: bool) -> None:
        try:
            if thread is not None:
                thread.close()
            if clean:
                self._remove_storage()
        finally:
            for lock in (self._spill_lock, self._storage_lock, self._lock):
                if lock is not None:
                    os.close(lock)
            self._spill_lock = self._storage_lock = self._lock = None

    def _make_children(self) -> list[Child]:
        units = [Child(f"unit-{unit}", self._unit_arguments(unit)) for unit in range(self._units)]
        return [Child("controller", self._controller_arguments()), *units]

    def _common(self) -> list[str]:
        return [
            "--run", self.address["run"], "--key-file", self.address["key_file"], "--socket", self.address["socket"],
            "--segment-bytes", str(self._segment_bytes),
        ]  # fmt: skip

    def _controller_arguments(self) -> list[str]:
        fsync = ["--fsync"] if self._fsync else []
        network = ["--network", self.address["network"]] if self._bind is not None else []
        network += ["--unit-lost-after", str(self._unit_lost_after)]
        return ["controller", *self._common(), "--directory", str(self.directory), *fsync, *network, *self._fetching]

    def _unit_arguments(self, unit: int) -> list[str]:
        private = f"ipc://{self._sockets}/u{unit}"
        endpoint = private if self._bind is None else f"{self._bulk_scheme}://{host_of(self._bind)}:*"
        return [
            "unit", *self._common(), "--directory", str(self._storage / f"unit-{unit}"), "--unit", str(unit),
            "--endpoint", endpoint, "--budget", str(self._budget),
            *spill_arguments(self._spill, unit, self._spill_budget),
        ]  # fmt: skip


def read_address(directory: str | Path) -> dict[str, str]:
    """The address of the queue service in `directory`. Raises Disconnected if there is none."""
    directory = Path(directory).absolute()
    known = read_run(directory)
    if not known:
        raise Disconnected(f"no queue in {directory}: its run.json is missing; `serve {directory}` starts one there")
    address = {"run": known["run"], "socket": f"unix://{known['sockets']}/c", "key_file": str(directory / "key")}
    if "network" in known:
        address |= {"network": known["network"], "node": known.get("node", "")}
    return address


def read_run(directory: Path) -> dict[str, str]:
    """What stands in run.json there: run, storage, sockets, budget and, if it is bound, network, node and bulk; empty
    if there is none. Raises Invalid for a damaged one."""
    path = directory / "run.json"
    try:
        known = json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    except Invalid:  # no regular file; as a ValueError it would count as no JSON
        raise
    except (ValueError, RecursionError):  # not JSON, or not even text
        known = None
    if not isinstance(known, dict) or not all(isinstance(known.get(name), str) for name in _RUN_FIELDS):
        raise _damaged(path)
    if not (known["run"] and known["budget"].isdecimal() and os.path.isabs(known["storage"])):
        raise _damaged(path)
    return known


def _network(ip: str, known: str | None) -> str:
    """The controller's endpoint for other nodes: the one it had, so that they find it again, else at a free port."""
    if known is not None and known.startswith(f"curve://{host_of(ip)}:"):
        return known
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
        try:
            probe.bind((ip, 0))
        except OSError as error:
            raise Invalid(f"bind={ip}: {error.strerror}; give an IP of this machine, as `hostname -I` shows") from None
        return f"curve://{host_of(ip)}:{probe.getsockname()[1]}"


def _damaged(path: Path) -> Invalid:
    return Invalid(
        f"{path} is damaged: expected a JSON object with {', '.join(_RUN_FIELDS)}; put back a copy, or remove the "
        f"directory {path.parent} to start an empty queue"
    )


def _sockets_directory(directory: Path, known: str | None) -> Path:
    """A private directory whose socket paths are short enough: the one used before, if it is still there."""
    if known is not None and _is_private(Path(known)):
        return Path(known)
    near = directory / "sockets"
    if len(os.fsencode(near)) + len("/u1023") <= MAX_IPC_PATH:
        private_directory(near)
        near.chmod(0o700)
        return near
    return Path(tempfile.mkdtemp(prefix="tq-", dir="/tmp"))


def _is_private(directory: Path) -> bool:
    try:
        info = directory.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077
