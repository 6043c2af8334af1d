"""The process of one rank: a Ray actor around one worker."""

from __future__ import annotations

import os
import tempfile
import threading
from typing import Any, Literal

import ray

from streamrl.single_controller.worker import ClassWithInitArgs, RankInfo


class RankActor:
    """Calls run one at a time and in order; `until_death` has a thread of its own."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._store: Any = None

    def identify(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "ip": ray.util.get_node_ip_address()}

    def open_rendezvous(self, kind: Literal["file", "tcp"]) -> str:
        """Where the ranks meet (rank 0 only). The port is the kernel's choice and held from now on: no collision."""
        if kind == "file":
            return f"file://{tempfile.mkdtemp(prefix='streamrl-ranks-')}/store"
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"tcp://{host}:{self._store.port}"

    def start(self, worker: ClassWithInitArgs, info: RankInfo) -> None:
        self._worker = worker.construct(info)

    def run(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        return getattr(self._worker, method)(*args, **kwargs)

    @ray.method(concurrency_group="watch")
    def until_death(self) -> None:
        """Never returns: its caller learns of the end of this process as an event."""
        threading.Event().wait()
