"""A whole queue in one seeded loop: its controller, units and clients as processes that can be killed at any failpoint.

    world = World(loop, directory, faults=Faults(...))
    world.start()
    world.spawn("trainer", program)          program(process) is run; if the process is killed, `again` starts it anew

The code that runs is that of the real processes: ControllerServer, Unit, SocketTransport, QueueClient, journal and
segment files. What is replaced: sockets (network.py), clocks and threads (loop.py), bulk sockets (all units are near).
A killed process does nothing any more: what it sends goes nowhere, its tasks end, its files and locks are let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.queue.chaos.disk import Disk
from tests.queue.chaos.invariants import Checker
from tests.queue.chaos.loop import SeededLoop
from tests.queue.chaos.network import SimListener
from tests.queue.chaos.process import PROCESS, Clock, Elsewhere, Killed, Process, SimTransport
from transfer_queue.clients import access, async_client
from transfer_queue.controller import process as controller
from transfer_queue.controller.core import ControllerCore
from transfer_queue.controller.process import ControllerServer
from transfer_queue.errors import QueueError
from transfer_queue.failpoints import hooked
from transfer_queue.net import transport
from transfer_queue.net.messages import Record
from transfer_queue.storage import history, unit, unit_files
from transfer_queue.storage.journal import Journal, frame
from transfer_queue.storage.unit_files import UnitFiles

SEGMENT, BUDGET, DISK, KEY = 64 << 10, 8 * (64 << 10), 1 << 30, "0" * 64

CONTROLLER = ("controller.", "snapshot.", "recovery.")
"""What the names of the controller's failpoints begin with."""


@dataclass
class Faults:
    """What happens to whom. `planned`: (failpoint, nth): the process that passes it for the nth time dies there."""

    planned: list[tuple[str, int]] = field(default_factory=list)
    kill_every: float = 0.0  # seconds between deaths at any moment, on average; 0: none
    break_every: float = 0.0  # seconds between connections lost
    lose_every: float = 0.0  # seconds between storage units that die and lose all they had
    power_every: float = 0.0  # seconds between deaths of the whole machine, in midst of a sync: what it had not is lost
    repeats: float = 0.02  # part of the requests that arrive twice
    delay: float = 0.002  # seconds on the way, on average


class World:
    """See the module."""

    def __init__(self, loop: SeededLoop, directory: Path, faults: Faults, *, units: int = 2) -> None:
        self.loop, self.directory, self.faults = loop, directory, faults
        self.random = random.Random(loop.random.random())
        self.listener: SimListener | None = None
        self.server: ControllerServer | None = None
        self.checker = Checker()
        self.trace: list[tuple[Any, ...]] = []
        self.fired: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()
        self.losses = 0
        self.blackouts = 0
        self._power_fails = False  # with the next sync
        self.disk: Disk | None = None  # if the power may fail
        self.quiet = False  # no more faults
        self.over = False  # nothing is started any more
        self._passed: Counter[str] = Counter()
        self._planned = set(faults.planned)
        self._identities = 0
        self._units: dict[int, Process] = {}
        self._clients: dict[str, Process] = {}
        self.failures: list[BaseException] = []
        loop.owner = self._own
        loop.set_exception_handler(self._on_exception)
        key = directory / "key"
        unit_files.replace_file(key, KEY)
        self.address = {"run": "run", "socket": "unix:///simulated", "key_file": str(key)}
        self._count = units

    # --- life --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """The product with simulated sockets, clock and failpoints."""
        append = Journal.append

        def watched_append(journal: Journal, record: Record) -> None:
            append(journal, record)
            self.checker.recorded(record)

        def listener_at(endpoint: str, key: str) -> Callable[..., SimListener]:
            return partial(SimListener, self)

        with contextlib.ExitStack() as stack:
            for patch in (
                mock.patch.object(controller, "_listener_at", listener_at),
                mock.patch.object(controller, "time", Clock(self.loop)),
                mock.patch.object(async_client, "SocketTransport", SimTransport),
                mock.patch.object(unit, "SocketTransport", SimTransport),
                mock.patch.object(transport, "check_endpoint"),
                mock.patch.object(access, "BulkClient", Elsewhere),
                mock.patch.object(unit_files, "first_incarnation", partial(self.random.randrange, 1 << 20)),
                mock.patch.object(history, "TAIL", 0.001),
                mock.patch.object(Journal, "append", watched_append),
            ):
                stack.enter_context(patch)
            if self.faults.power_every:
                self.disk = Disk(self.directory, stack.enter_context(pytest.MonkeyPatch.context()))
            else:
                stack.enter_context(mock.patch.object(os, "fsync"))
            stack.enter_context(hooked(self._at_failpoint))
            yield

    def start(self) -> None:
        self._start_controller()
        for number in range(self._count):
            self._start_unit(number)
        if self.faults.kill_every:
            self._later(self.faults.kill_every, self._kill_somebody)
        if self.faults.break_every:
            self._later(self.faults.break_every, self._break_something)
        if self.faults.lose_every:
            self._later(self.faults.lose_every, self._lose_a_unit)
        if self.faults.power_every:
            self._later(self.faults.power_every, self._let_power_fail)

    def spawn(self, name: str, program: Callable[[Process], Coroutine[Any, Any, None]], *, again: bool = True) -> None:
        """Run a client process; started again whenever it was killed."""
        process = Process(self, name)
        self._clients[name] = process

        async def main() -> None:
            try:
                await program(process)
            except BaseException as error:
                if not process.dead:
                    self._fail(error)
                    raise
            finally:
                if self._clients.get(name) is process:
                    del self._clients[name]
            if process.dead and again and not self.over:
                self.loop.call_later(self.random.uniform(0.01, 3.0), self.spawn, name, program)

        self._in(process, main())

    def end_faults(self) -> None:
        self.quiet = True

    def stop(self) -> None:
        """End everything; files are left."""
        self.quiet = self.over = True
        for process in (*self._clients.values(), *self._units.values()):
            process.kill(noticed=False)
        if self.server is not None:
            self.server.close()
            self.server = self.listener = None

    def check(self) -> None:
        """Raise the first failure of a simulated process, or of an invariant."""
        if self.failures:
            raise self.failures[0]

    # --- controller ----------------------------------------------------------------------------------------------

    def as_controller(self, act: Callable[..., None], *arguments: Any) -> None:
        """Something happens in the controller's process, which may die of it."""
        try:
            act(*arguments)
        except Killed:
            return
        if self.server is not None:
            self._invariants()

    def kill_controller(self) -> None:
        """SIGKILL, at any time; the supervisor starts it again soon."""
        server, self.server, self.listener = self.server, None, None
        if server is None:
            return
        self.note("dies", "controller")
        self.deaths["controller"] += 1
        server.close()
        self._tear_journal()
        self.loop.call_later(self.random.uniform(0.02, 2.0), self._start_controller)

    def tell_of_death(self, client: str) -> None:
        if self.server is not None:
            self.as_controller(self.server._gone, client)

    def _start_controller(self) -> None:
        self.note("starts", "controller")

        def make_core(send: Callable[..., None]) -> ControllerCore:
            core = ControllerCore.recover(
                self.directory / "journal", send=send, now=self.loop.time(), run="run", key=KEY,
                segment_bytes=SEGMENT, paged=True,
            )  # fmt: skip
            self.checker.recovered(core)
            return core

        try:
            self.server = ControllerServer(["unix:///simulated"], KEY, make_core)
        except Killed:
            self.loop.call_later(self.random.uniform(0.02, 2.0), self._start_controller)
            return
        except BaseException as error:  # noqa: BLE001
            return self._fail(error)
        self.listener = self.server._listener  # pyright: ignore

    def _tear_journal(self) -> None:
        """Sometimes the record that was being written when the process died is there in part."""
        path = self.directory / "journal"
        if self.random.random() < 0.3 and path.exists() and path.stat().st_size:
            whole = frame(bytes(self.random.randrange(256) for _ in range(self.random.randrange(1, 200))))
            with path.open("ab") as file:
                file.write(whole[: self.random.randrange(1, len(whole))])

    # --- units ---------------------------------------------------------------------------------------------------

    def _start_unit(self, number: int) -> None:
        process = self._units[number] = Process(self, f"unit-{number}")

        async def serve() -> None:
            disk = self.directory / f"disk-{number}"
            files = UnitFiles(self.directory / f"unit-{number}", number, budget=BUDGET, spill=disk)
            process.closing.append(files.close)
            shell = unit.Unit(files, "ipc:///simulated", SEGMENT, DISK)
            await unit._serve(shell, self.address, lambda: None, 1e9)

        async def main() -> None:
            try:
                await serve()
            except QueueError as error:  # the child process ends, and is started again
                self.note("ends", process.name, str(error))
                process.kill()
            except BaseException as error:
                if not process.dead:
                    self._fail(error)
                    raise
            if not self.over:
                self.loop.call_later(self.random.uniform(0.02, 1.0), self._start_unit, number)

        self._in(process, main())

    # --- faults --------------------------------------------------------------------------------------------------

    def delay(self) -> float:
        return self.random.expovariate(1 / self.faults.delay)

    @property
    def repeats(self) -> float:
        return 0.0 if self.quiet else self.faults.repeats

    def _at_failpoint(self, name: str) -> None:
        mine = name.startswith(CONTROLLER)
        process = None if mine else PROCESS.get()
        if self.quiet or (process is None and not mine) or (process is not None and process.dead):
            return
        self._passed[name] += 1
        if name == "controller.before_sync" and self._power_fails:
            self._power_fails = False
            self.loop.call_later(self.random.uniform(0.0, 0.02), self._lose_power)
        if (name, self._passed[name]) not in self._planned:
            return
        self.fired[name] += 1
        self.note("failpoint", name)
        if process is not None:
            self._kill_process(process)
        else:
            self.kill_controller()
        raise Killed(name)

    def _kill_process(self, process: Process) -> None:
        self.deaths[process.name.partition("-")[0]] += 1
        process.kill(noticed=process in self._units.values() or self.random.random() < 0.7)

    def _kill_somebody(self) -> None:
        if self.quiet:
            return
        victims: list[Process | None] = [None, *self._units.values(), *self._clients.values()]
        victim = self.random.choice(victims)
        if victim is None:
            self.kill_controller()
        elif not victim.dead:
            self._kill_process(victim)
        self._later(self.faults.kill_every, self._kill_somebody)

    def _break_something(self) -> None:
        if self.quiet:
            return
        links = [link for p in (*self._units.values(), *self._clients.values()) if not p.dead for link in p.links]
        if links:
            self.random.choice(links).break_off()
        self._later(self.faults.break_every, self._break_something)

    def _lose_a_unit(self) -> None:
        if self.quiet:
            return
        number, process = self.random.choice(list(self._units.items()))
        if not process.dead:
            self.losses += 1
            self.note("loses its disk", process.name)
            self._kill_process(process)
            for home in (f"unit-{number}", f"disk-{number}"):
                shutil.rmtree(self.directory / home, ignore_errors=True)
        self._later(self.faults.lose_every, self._lose_a_unit)

    def _let_power_fail(self) -> None:
        self._power_fails = True

    def _lose_power(self) -> None:
        """The machine dies with all processes; its memory is gone, and of its disk what no sync has covered."""
        if self.quiet:
            return
        assert self.disk is not None
        self.blackouts += 1
        self.note("loses power", "everybody")
        self.kill_controller()
        for process in (*self._clients.values(), *self._units.values()):
            if not process.dead:
                self._kill_process(process)
        for number in self._units:
            shutil.rmtree(self.directory / f"unit-{number}", ignore_errors=True)
        self.disk.lose_power()
        unit_files.replace_file(self.directory / "key", KEY)
        self.checker.lost_power()
        self._later(self.faults.power_every, self._let_power_fail)

    def _later(self, every: float, act: Callable[[], None]) -> None:
        self.loop.call_later(self.random.expovariate(1 / every), act)

    # --- the rest --------------------------------------------------------------------------------------------------

    def new_identity(self, name: str) -> bytes:
        self._identities += 1
        return f"{name}.{self._identities:024d}".encode()

    def note(self, *event: Any) -> None:
        self.trace.append((round(self.loop.time(), 6), *event))

    def _invariants(self) -> None:
        assert self.server is not None
        try:
            self.checker.check(self.server._core)
        except AssertionError as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.note("FAILURE", repr(error))
        self.failures.append(error)

    def _in(self, process: Process, work: Coroutine[Any, Any, None]) -> None:
        token = PROCESS.set(process)
        try:
            self.loop.create_task(work)
        finally:
            PROCESS.reset(token)

    def _own(self, task: asyncio.Task[Any]) -> None:
        process = PROCESS.get()
        if process is not None:
            process.tasks.append(task)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Out of a callback: a death, or a bug."""
        error = context.get("exception")
        if error is None or isinstance(error, Killed):
            return
        task = context.get("task") or context.get("future")
        if "never retrieved" in context["message"] and task is not None:
            return
        self._fail(error)
