"""Child processes that are started again whenever they end.

    start -> spawn -> ready (the child wrote to its pipe) -> ended (pidfd) -> spawn at once, or after a pause if it
    lived shorter than SHORT_LIFE -> ...

Woken by pipes and pidfds; it never polls. Children die with this process, and with the thread that runs the loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from transfer_queue.errors import DeadlineExceeded
from transfer_queue.service.lifetime import exited
from transfer_queue.storage.private import open_regular, read_regular

log = logging.getLogger(__name__)

SHORT_LIFE = 1.0
"""A process that lived shorter than this (seconds) is started again only after a pause, up to LONGEST_PAUSE."""

LONGEST_PAUSE = 2.0

START_ATTEMPTS = 3
"""A process that ends this often before it has ever served is a failure of `start`, told without waiting longer."""

STOP_WAIT = 3.0
"""Seconds that a process gets to end after SIGTERM."""


@dataclass(slots=True)
class Child:
    """A process to keep running: `python -m transfer_queue.service.child <arguments>`."""

    name: str
    arguments: list[str]
    process: subprocess.Popen | None = None
    restarts: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None


class Supervisor:
    """Keeps children running, in the event loop that calls `start`. Their output goes to `<logs>/<name>.log`."""

    def __init__(self, children: list[Child], logs: Path) -> None:
        """The first child is stopped last: the others depend on it."""
        self.children = children
        self._logs = logs
        self._tasks: list[asyncio.Task] = []
        self._before: dict[str, int] = {}  # bytes of each log that are from before `start`
        self._failed = asyncio.Event()  # a process has ended so often that it will never serve

    async def start(self, timeout: float) -> None:
        """Start all and wait until all serve. Raises DeadlineExceeded with the last words of those that do not."""
        self._before = {child.name: self._log_size(child.name) for child in self.children}
        self._tasks = [asyncio.create_task(self._supervise(child)) for child in self.children]
        ready = asyncio.create_task(self._all_ready())
        failed = asyncio.create_task(self._failed.wait())
        await asyncio.wait([ready, failed], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        failed.cancel()
        missing = [child for child in self.children if not child.ready.is_set()]
        if missing:  # of those, the ones that ended: the others only wait for them
            ended = [child.name for child in missing if child.restarts >= START_ATTEMPTS]
            names = ended or [child.name for child in missing]
            words = "; ".join(f"{name}: {self._last_words(name)}" for name in names)
            what = f"ended {START_ATTEMPTS} times at start" if ended else f"did not start within {timeout:.0f} s"
            raise DeadlineExceeded(f"{', '.join(names)} {what} (logs in {self._logs}): {words}")

    async def _all_ready(self) -> None:
        for child in self.children:
            await child.ready.wait()

    async def stop(self) -> None:
        """End all children: SIGTERM, then SIGKILL."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(child) for child in self.children[1:]))
        for child in self.children[:1]:
            await self._end(child)

    async def _supervise(self, child: Child) -> None:
        """Keep one process running, for ever."""
        loop = asyncio.get_running_loop()
        pause = 0.0
        while True:
            started = loop.time()
            try:
                code = await self._run_once(child)
            except OSError as error:  # no memory for a process, no room for a log, no descriptor to watch it
                code = error
                if child.process is not None and child.process.poll() is None:
                    child.process.kill()
                    child.process.wait()
            lived = loop.time() - started
            pause = 0.0 if lived > SHORT_LIFE else min(LONGEST_PAUSE, max(0.05, 2 * pause))
            child.restarts += 1
            if child.restarts >= START_ATTEMPTS and not child.ready.is_set():
                self._failed.set()
            log.warning("%s ended (%s) after %.1f s; starting it again in %.2f s", child.name, code, lived, pause)
            await asyncio.sleep(pause)

    async def _run_once(self, child: Child) -> int:
        """Start the process and wait for its end: its exit status."""
        # Started by this very thread, which lives as long as the service: the child dies with it (die_with_parent).
        output = open_regular(self._logs / f"{child.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o644)
        ready_read, ready_write = os.pipe()
        command = [
            sys.executable, "-m", "transfer_queue.service.child", *child.arguments,
            "--parent", str(os.getpid()), "--ready-fd", str(ready_write),
        ]  # fmt: skip
        try:
            child.process = subprocess.Popen(  # noqa: ASYNC220
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(ready_write,),
                env=_environment(), start_new_session=True,
            )  # fmt: skip
        except OSError:
            os.close(ready_read)
            raise
        finally:
            os.close(output)
            os.close(ready_write)
        loop = asyncio.get_running_loop()
        loop.add_reader(ready_read, _take_ready, loop, ready_read, child.ready)
        await exited(child.process.pid)
        return child.process.wait()

    async def _end(self, child: Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        await asyncio.wait([exited(process.pid)], timeout=STOP_WAIT)
        if process.poll() is None:
            log.warning("%s does not end; killing it", child.name)
            process.kill()
            await exited(process.pid)
            process.wait()

    def _last_words(self, name: str) -> str:
        try:
            words = read_regular(self._logs / f"{name}.log")[self._before.get(name, 0) :]
        except OSError:
            words = b""
        lines = words.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "wrote no log"

    def _log_size(self, name: str) -> int:
        try:
            return (self._logs / f"{name}.log").stat().st_size
        except OSError:
            return 0


def _environment() -> dict[str, str]:
    """This process' environment, in which the child finds the same transfer_queue and starts one thread."""
    here = str(Path(__file__).resolve().parents[2])
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"}


def _take_ready(loop: asyncio.AbstractEventLoop, fd: int, ready: asyncio.Event) -> None:
    """The child wrote that it serves, or closed its end without."""
    if os.read(fd, 16):
        ready.set()
    loop.remove_reader(fd)
    os.close(fd)
