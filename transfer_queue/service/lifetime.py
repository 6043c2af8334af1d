"""What a process needs that is started and watched by another one: dying with its parent, saying that it is ready,
waiting for a process without being its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's mallopt."""


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` (the thread in it that started us) ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call
        sys.exit(f"parent process {parent} is already gone")


def be_served_first() -> None:
    """Take off the niceness inherited from who started us (Ray's workers have 15), where that is permitted: everybody
    waits for these processes."""
    if os.getpriority(os.PRIO_PROCESS, 0) <= 0:
        return
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def collect_only_young_garbage() -> None:
    """Let the garbage collector leave alone what has lived for long: one look at the groups of a million rows takes
    140 ms. Old objects are freed when nothing refers to them any more; cycles of old ones are not made here."""
    gc.freeze()
    gc.set_threshold(1000, 5, 1 << 30)


def give_back_large_tables() -> None:
    """Let tables of a MiB and more have pages of their own: they are moved when a table grows, and go when it is freed.

    By default the allocator raises that limit to the largest table freed so far, up to 32 MiB. The holes that growing
    tables then leave in its heap took a tenth of the memory of a million rows. Does nothing where there is no glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        mallopt(_M_TRIM_THRESHOLD, 4 << 20)


def allow_many_files() -> None:
    """Two descriptors for each client (connection and pidfd) are more than the usual soft limit of 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def stop_event() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set, in the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def boot_id() -> str:
    """Of the running kernel: another one for each machine and each boot, the same in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class ReadyPipe:
    """The child's end of the pipe by which it tells its parent, once, that it serves."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def say(self) -> None:
        if self._fd is not None:
            os.write(self._fd, b"ready")
            os.close(self._fd)
            self._fd = None


def exited(pid: int) -> asyncio.Future[None]:
    """A future that is done when process `pid` has ended. It need not be a child."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        future.set_result(None)
        return future

    def end() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        if not future.done():
            future.set_result(None)

    def cancelled(_: asyncio.Future[None]) -> None:
        if future.cancelled():
            end()

    loop.add_reader(fd, end)
    future.add_done_callback(cancelled)
    return future


def wait_for_exit(pid: int, timeout: float) -> bool:
    """Block until process `pid` has ended; whether it has within `timeout` seconds."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(timeout * 1000))
    finally:
        os.close(fd)
