"""Storage units of one node, for a controller on another one.

    node = UnitService(directory, address, units=[3], bind="10.0.0.7")    # address: of the QueueService
    node.start()

As with the controller's own node, nothing is lost when it is killed: a UnitService on the same directory serves the
same units again, with what lies in their segments. Its key file must be at the place that the address names.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transfer_queue.errors import Invalid
from transfer_queue.net.addresses import endpoint_of
from transfer_queue.net.curve import check_ip, host_of
from transfer_queue.net.loop import LoopThread
from transfer_queue.net.transport import read_key
from transfer_queue.service.supervisor import Child, Supervisor
from transfer_queue.storage.leftovers import PREFIX, remove_leftovers
from transfer_queue.storage.place import choose_spill, choose_storage
from transfer_queue.storage.private import private_directory, read_regular
from transfer_queue.storage.segments import MAX_UNITS, check_segment_bytes
from transfer_queue.storage.spill import spill_arguments
from transfer_queue.storage.unit_files import lock_file, replace_file

LOCK_WAIT = 5.0
"""Seconds to wait for a service on the same directory that was killed and is not wholly gone yet."""


class UnitService:
    """See the module. Methods may be called from any thread."""

    def __init__(
        self, directory: str | Path, address: dict[str, str], *, units: Sequence[int], bind: str,
        storage_dir: str | Path | None = None, unit_budget_bytes: int | None = None, segment_bytes: int = 8 << 20,
        spill_dir: str | Path | None = None, spill_budget_bytes: int | None = None, encrypt_bulk: bool = False,
    ) -> None:  # fmt: skip
        """`units`: their numbers, which no other unit of this run ever has; `bind`: this node's IP; the rest is as in
        QueueService. Raises Invalid, Disconnected (no key file); nothing is started yet."""
        if not units or any(not 0 <= unit < MAX_UNITS for unit in units):
            raise Invalid(f"units {list(units)}: give at least one number of 0 to {MAX_UNITS - 1}")
        check_ip(bind)
        check_segment_bytes(segment_bytes)
        read_key(address["key_file"])
        self.directory = Path(directory).absolute()
        self.units = list(units)
        self._address = address
        self._segment_bytes = segment_bytes
        self._bulk = f"{'curve' if encrypt_bulk else 'tcp'}://{host_of(bind)}:*"
        known = read_node(self.directory)
        if known and known["units"] == self.units and Path(known["storage"]).is_dir():
            self._storage, self._budget = Path(known["storage"]), unit_budget_bytes or known["budget"]
        else:
            parent, self._budget = choose_storage(storage_dir, len(units), unit_budget_bytes)
            remove_leftovers(parent)
            self._storage = parent / f"{PREFIX}{address['run']}.{units[0]}"
        self._spill = self.directory / "spill"
        if "spill_budget" in known:  # rows may lie there
            self._spill = Path(known.get("spill", self._spill))
            self._spill_budget = known["spill_budget"] if spill_budget_bytes is None else spill_budget_bytes
        else:
            if spill_dir is not None:
                self._spill = Path(spill_dir).absolute() / f"{PREFIX}{address['run']}.{units[0]}"
            self._spill_budget = choose_spill(self.directory, spill_dir, len(units), self._budget, spill_budget_bytes)
        self._supervisor = Supervisor([], self.directory)
        self._thread: LoopThread | None = None
        self._locks: list[int] = []
        self._guard = threading.Lock()

    def start(self, timeout: float = 20.0) -> None:
        """Start the units and return once the controller has them. Raises DeadlineExceeded."""
        with self._guard:
            if self._thread is not None:
                return
            for directory in (self.directory, self._storage):
                private_directory(directory)
            replace_file(self._storage / "owner", str(self.directory))
            description = {"units": self.units, "storage": str(self._storage), "budget": self._budget}
            description |= {"spill": str(self._spill), "spill_budget": self._spill_budget}
            replace_file(self.directory / "node.json", json.dumps(description))
            locks = [self.directory / "service.lock", self._storage / "lock"]
            if self._spills() and self._spill.parent != self.directory:  # which is not ours: it says whose it is
                remove_leftovers(self._spill.parent)
                private_directory(self._spill)
                replace_file(self._spill / "owner", str(self.directory))
                locks.append(self._spill / "lock")
            self._locks = [lock_file(path, "a unit service", wait=LOCK_WAIT) for path in locks]
            self._thread = LoopThread("unit-service")
            try:
                self._supervisor = Supervisor([self._child(unit) for unit in self.units], self.directory)
                self._thread.run(self._supervisor.start(timeout))
            except BaseException:
                self._stop(clean=False)
                raise

    def stop(self, *, clean: bool = False) -> None:
        """End the units. With `clean` the stored bytes go too; else a UnitService on this directory goes on."""
        with self._guard:
            self._stop(clean=clean)

    def pids(self) -> dict[str, int]:
        """Process ids by name; a process that is being restarted is left out."""
        alive = [child for child in self._supervisor.children if child.alive()]
        return {child.name: child.process.pid for child in alive if child.process is not None}

    async def astart(self, timeout: float = 20.0) -> None:
        """`start` for callers with an event loop."""
        await asyncio.to_thread(self.start, timeout)

    async def astop(self, *, clean: bool = False) -> None:
        """`stop` for callers with an event loop."""
        await asyncio.to_thread(lambda: self.stop(clean=clean))

    def _stop(self, *, clean: bool) -> None:
        if self._thread is not None:
            self._thread.run(self._supervisor.stop())
            self._thread.close()
            self._thread = None
        if clean:
            shutil.rmtree(self._storage, ignore_errors=True)
            shutil.rmtree(self._spill, ignore_errors=True)
        for lock in self._locks:
            os.close(lock)
        self._locks = []

    def _spills(self) -> bool:
        return self._spill_budget > 0 or self._spill.is_dir()

    def _child(self, unit: int) -> Child:
        spill = self._spill if self._spills() else None
        arguments = [
            "unit", "--run", self._address["run"], "--key-file", self._address["key_file"],
            "--socket", endpoint_of(self._address), "--segment-bytes", str(self._segment_bytes),
            "--directory", str(self._storage / f"unit-{unit}"), "--unit", str(unit),
            "--endpoint", self._bulk, "--budget", str(self._budget),
            *spill_arguments(spill, unit, self._spill_budget),
        ]  # fmt: skip
        return Child(f"unit-{unit}", arguments)


def read_node(directory: Path) -> dict[str, Any]:
    """What stands in node.json there: units, storage, budget; empty if there is none. Raises Invalid for a damaged
    one."""
    path = directory / "node.json"
    try:
        known = json.loads(read_regular(path))
        whole = all(
            isinstance(known[name], kind) for name, kind in (("units", list), ("storage", str), ("budget", int))
        )
    except FileNotFoundError:
        return {}
    except Invalid:
        raise
    except (ValueError, RecursionError, KeyError, TypeError):
        whole = False
    if not whole:
        raise Invalid(f"{path} is damaged: remove the directory {directory}; the rows of its units are generated again")
    return known
