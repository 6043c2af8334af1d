"""A worker for tests of worker groups: it computes nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import Any

from streamrl import DataProto
from streamrl.single_controller import (
    Dispatch,
    Execute,
    Mean,
    Metric,
    RankInfo,
    Total,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from transfer_queue.metadata import KVBatchMeta


class EchoWorker(Worker):
    def __init__(self, rank: RankInfo, greeting: str = "hello") -> None:
        super().__init__(rank)
        self.greeting = greeting
        self._said = threading.Event()

    @register(Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[str, int, int]:
        return self.greeting, self.rank.rank, self.rank.world_size

    @register(Dispatch.RANK_ZERO)
    def who(self) -> int:
        return self.rank.rank

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def only_first(self) -> int:
        return self.rank.rank

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.DP_COMPUTE)
    def keys(self, batch: KVBatchMeta, prefix: str = "") -> list[str]:
        return [prefix + key for key in batch.keys]

    @register(Dispatch.DP_COMPUTE)
    def count(self, batch: KVBatchMeta) -> dict[str, Metric]:
        lengths = [tag["seq_len"] for tag in batch.tags]
        return {"rows": Total(len(batch)), "length": Mean(float(sum(lengths)), len(lengths))}

    @register(Dispatch.DP_COMPUTE_PROTO)
    def doubled(self, data: DataProto) -> DataProto:
        assert data.batch is not None
        data.batch["ids"] *= 2
        data.meta_info["metrics"] = {"rows": Total(len(data))}
        return data

    @register(Dispatch.ALL_TO_ALL)
    def mine(self, item: str, *, other: int) -> tuple[int, str, int]:
        return self.rank.rank, item, other

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def threads(self) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")

    @register(Dispatch.ONE_TO_ALL, beside=True)
    def heard(self, seconds: float) -> bool:
        return self._said.wait(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def say(self) -> None:
        self._said.set()

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, rank: int) -> None:
        if self.rank.rank == rank:
            raise ValueError(f"rank {rank} does not like this")

    @register(Dispatch.ONE_TO_ALL)
    def hang(self, rank: int) -> None:
        if self.rank.rank == rank:
            threading.Event().wait()

    @register(Dispatch.ONE_TO_ALL)
    def die(self, rank: int) -> None:
        """The others wait, as peers in a collective do."""
        if self.rank.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    @register(Dispatch.ONE_TO_ALL)
    def crash(self) -> None:
        """Natively, as a library with a bug does."""
        ctypes.string_at(0)

    def not_registered(self) -> Any: ...


class SharingWorker(EchoWorker):
    """All ranks work on the same rows, and the last one collects."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self._register_dispatch_collect_info("actor", 0, self.rank.rank == self.rank.world_size - 1)

    @register(make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def all_rows(self, batch: KVBatchMeta) -> list[str]:
        return batch.keys
