"""The process of one rank: a Ray actor around its workers, one per role."""

from __future__ import annotations

import faulthandler
import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import Any, Literal

import ray

from agent_loop.user_code import with_place
from streamrl.monitor.events import EventLog
from streamrl.process_log import write_to
from streamrl.single_controller.worker import ClassWithInitArgs, RankInfo, loaded

log = logging.getLogger(__name__)

STDERR = 2
"""The descriptor: Ray points it at the worker's file, where native code writes too."""

TASKS = "/proc/self/task"


class RankActor:
    """Calls run one at a time and in order; `until_death` and those that run beside have threads of their own.

    Its log (`identify()["log"]`) says enough after a crash in native code: the Python stacks of all threads, and the
    name of each thread, since a stack of gloo's, ZeroMQ's or gRPC's own threads holds no Python frame.
    """

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}
        self._store: Any = None
        self._threads: set[int] = set()
        self._events = EventLog(None, "rank")
        faulthandler.enable(file=STDERR, all_threads=True)  # Ray's own shows the crashed thread only
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def identify(self, log_file: str = "") -> dict[str, Any]:
        """`log_file`: where it writes from now on, instead of Ray's file: <run>/logs/<name>.log. Its events go to
        <run>/events/<name>."""
        if log_file:
            path = Path(log_file)
            write_to(path)
            self._events = EventLog(path.parent.parent / "events", path.stem)
        return {"pid": os.getpid(), "ip": ray.util.get_node_ip_address(), "log": _path_of(STDERR)}

    def open_rendezvous(self, kind: Literal["file", "tcp"]) -> str:
        """Where the ranks meet (rank 0 only). The port is the kernel's choice and held from now on: no collision."""
        if kind == "file":
            return f"file://{tempfile.mkdtemp(prefix='streamrl-ranks-')}/store"
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"tcp://{host}:{self._store.port}"

    def start(self, workers: dict[str, ClassWithInitArgs], info: RankInfo) -> None:
        for role, worker in workers.items():
            self._workers[role] = worker.construct(info)

    def run(self, role: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            with self._events.span("rank", task=method, role=role):
                return getattr(self._workers[role], method)(*loaded(args), **kwargs)
        except Exception as error:  # its traceback stays in this process
            log.exception("%s failed", method)
            raise with_place(error)  # noqa: B904
        finally:
            self._note_threads(method)

    def _note_threads(self, method: str) -> None:
        """Log the threads that came during a call: nearly all do in the first one."""
        ids = thread_ids()
        if new := ids - self._threads:
            names = ", ".join(f"{thread} {thread_name(thread)}" for thread in sorted(new))
            log.info("threads new after %s: %s", method, names)
        self._threads = ids

    @ray.method(concurrency_group="beside")
    def run_beside(self, role: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`run`, whatever else runs."""
        return self.run(role, method, args, kwargs)

    @ray.method(concurrency_group="watch")
    def until_death(self) -> None:
        """Never returns: its caller learns of the end of this process as an event."""
        threading.Event().wait()


def thread_ids() -> set[int]:
    """All threads of this process, by the ids that a crash report names; none where there is no /proc."""
    return {int(name) for name in os.listdir(TASKS)} if os.path.isdir(TASKS) else set()


def thread_name(thread: int) -> str:
    try:
        return Path(TASKS, str(thread), "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "(ended)"


def _path_of(descriptor: int) -> str:
    """The file behind a descriptor, empty if it is none that has a path."""
    link = Path(f"/proc/self/fd/{descriptor}")
    path = os.path.realpath(link) if link.exists() else ""
    return path if os.path.isfile(path) else ""
