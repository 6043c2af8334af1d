"""What the ranks of every trained model do: load it, read their rows, write their columns, save and restore.

    KVBatchMeta (this rank's keys) ──read the declared fields──► Rows ──engine──► columns back into the queue, metrics

Consumes references; reads exactly the fields that `contract.Reads` names, writes those in `contract.WRITES`; returns
metrics that add up over ranks. No token passes through the caller. Every method is collective: a rank whose share is
empty takes part.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.single_controller.decorator import Dispatch, register
from streamrl.single_controller.local_group import InOrder
from streamrl.single_controller.metrics import Mean, Metric, Peak
from streamrl.single_controller.worker import RankInfo, Worker
from streamrl.workers.batch import Rows
from streamrl.workers.contract import Reads, step_of
from streamrl.workers.engine.base import Engine
from streamrl.workers.engine.registry import EngineRegistry
from streamrl.workers.engine.settings import EngineSettings
from streamrl.workers.flops import FlopCounter, ModelFlops, peak_tflops
from streamrl.workers.row_store import RowStore, connect
from transfer_queue.metadata import KVBatchMeta


class TrainingWorker(Worker):
    """One rank. `queue` is the queue's address, or a store in this process (tests, `runtime=local`)."""

    role = "worker"
    """Names the connection to the queue, and the mesh by which batches are split."""

    def __init__(
        self, rank: RankInfo, reads: Reads, queue: dict[str, Any] | RowStore, profile: Profile | None = None
    ) -> None:
        super().__init__(rank)
        self._reads, self._queue, self._profile = reads, queue, profile
        self._store: RowStore | None = None
        self._engine: Engine | None = None
        self._writing: Future[None] | None = None
        self._flops = FlopCounter(None, None)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError(f"the {self.role} has no model yet: call init_model() first")
        return self._engine

    def _start(
        self, model_type: str, backend: str, settings: EngineSettings, peak_tflops: float | None = None
    ) -> dict[str, Any]:
        """Load the model and connect to the queue. Facts about the model. `peak_tflops`: of the device, None: by its
        name."""
        self._store = connect(self._queue, f"{self.role}-{self.rank.rank}")
        engine = EngineRegistry.get(model_type, backend)(self.rank, settings)
        facts = engine.initialize()
        self._engine = engine
        model = ModelFlops.at(settings.model_path, head=1 if model_type == "value_model" else None)
        peak = peak_tflops or device_peak(self.rank)
        self._flops = FlopCounter(model, peak * 1e12 if peak else None, adapters=settings.lora is not None)
        self._register_dispatch_collect_info(self.role, dp_rank=engine.dp_rank, is_collect=engine.collects)
        return facts

    # --- rows -----------------------------------------------------------------------------------------------------

    def _read(self, batch: KVBatchMeta, method: str) -> tuple[Rows, int]:
        """This rank's rows with the fields that `method` reads, and how many bytes they were."""
        fields = self._reads.of(method, batch.extra_info or {})
        if not batch.keys:
            return Rows([], [], {name: [] for name in fields if name != "input_ids"}), 0
        found = self._rows().get(partition_of(batch), batch.keys, fields)
        columns = {name: [found[name][i] for i in range(len(batch.keys))] for name in fields}
        size = sum(values.nbytes for column in columns.values() for values in column)
        responses = [int(tag["response_len"]) for tag in batch.tags]
        input_ids = columns.pop("input_ids", None)
        for name, column in columns.items():
            for key, values, response in zip(batch.keys, column, responses, strict=True):
                if len(values) != response:
                    raise ValueError(f"row {key}: {name} has {len(values)} entries, its tag response_len is {response}")
        return Rows(input_ids or [np.zeros(0, np.int64)] * len(responses), responses, columns), size

    def _write(
        self, batch: KVBatchMeta, columns: Mapping[str, Sequence[np.ndarray]], tags: list[dict[str, Any]] | None = None
    ) -> int:
        """Columns of this rank's rows, under the batch's lease; how many bytes. One rank of those that share rows."""
        if not batch.keys or not self.engine.collects:
            return 0
        self._rows().put(partition_of(batch), batch.keys, columns, tags=tags, token=batch.token)
        return sum(values.nbytes for column in columns.values() for values in column)

    @contextmanager
    def rows_from(self, store: RowStore) -> Iterator[None]:
        """Rows come from `store` and columns go there, instead of the queue."""
        kept, self._store = self._store, store
        try:
            yield
        finally:
            self._store = kept

    def _rows(self) -> RowStore:
        if self._store is None:
            raise RuntimeError(f"the {self.role} is not connected to the queue yet: call init_model() first")
        return self._store

    def _profiled(self, info: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Around an update: the profiler, if this step is one of those that are profiled."""
        step = step_of(info)
        if self._profile is None or step not in self._profile.steps:
            return nullcontext()
        return self._profile.of(step, self.role, self.rank.rank)

    def _utilisation(self, name: str, seconds: float) -> dict[str, Metric]:
        """Of the device by what was counted since the last call, over all ranks; nothing where that is not known."""
        found = self._flops.take(seconds, self.engine.world_size // self.engine.dp_size)
        return {f"perf/mfu/{name}": Mean(*found)} if found else {}

    # --- state ----------------------------------------------------------------------------------------------------

    @register(Dispatch.RANK_ZERO)
    def state_digest(self) -> str:
        """sha256 over names, shapes and bytes of the full weights: equal weights, equal digest, on any world size."""
        digest = hashlib.sha256()
        for name, tensor in self.engine.full_state():
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: str, background: bool = False) -> None:
        """Weights, optimizer and generator states into `directory`, each rank its shard.

        With `background` they are copied to host memory before this returns, and written while the training goes on;
        call `checkpoint_written` once for each such save, before the next one.
        """
        if background:
            writing = self._hold(directory)
            self._writing = InOrder("checkpoint").last(writing)
        else:
            self._save(directory)

    def _save(self, directory: str) -> None:
        self.engine.save(directory)

    def _hold(self, directory: str) -> Callable[[], None]:
        """As `save`, of which the writing is left to the caller."""
        return self.engine.hold(directory)

    @register(Dispatch.ONE_TO_ALL, beside=True)
    def checkpoint_written(self) -> None:
        """Wait until this rank's part of the last `save_checkpoint` is on disk. Raises what kept it from that."""
        if self._writing is not None:
            self._writing.result()

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: str) -> None:
        """The inverse, on any number of ranks."""
        self.engine.load(directory)

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._store is not None:
            self._store.close()
        self._engine = self._store = None


@dataclass(frozen=True, slots=True)
class Profile:
    """torch's profiler around the updates of some steps: <directory>/step-000012-actor-r0.json, a Chrome trace."""

    steps: frozenset[int]
    directory: str

    @contextmanager
    def of(self, step: int, role: str, rank: int) -> Iterator[None]:
        from torch.profiler import profile

        with profile(record_shapes=True) as profiler:
            yield
        path = Path(self.directory)
        path.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path / f"step-{step:06d}-{role}-r{rank}.json"))


class Stopwatch:
    """Seconds by stage."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.stages: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.stages[stage] = self.stages.get(stage, 0.0) + time.perf_counter() - began

    @property
    def total(self) -> float:
        return time.perf_counter() - self._began


def check_finite(role: str, keys: Sequence[str], columns: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Of what `role`'s model gave, [R] per row. Raises FloatingPointError naming role, column and first row."""
    for name, column in columns.items():
        for key, values in zip(keys, column, strict=True):
            if broken := int(np.count_nonzero(~np.isfinite(values))):
                raise FloatingPointError(
                    f"the {role} gives {name} that are not finite, first in row {key} ({broken} of {len(values)} "
                    "tokens); its weights are broken, or its dtype is too narrow for them"
                )


def temperature_of(info: Mapping[str, Any]) -> float:
    value = float(info.get("temperature", 1.0))
    if value <= 0:
        raise ValueError(f"temperature={value}: log-probs need the temperature at which the rows were sampled, above 0")
    return value


def partition_of(batch: KVBatchMeta) -> str:
    if batch.partition_id is None:
        raise ValueError(f"{batch} names no partition")
    return batch.partition_id


def device_peak(rank: RankInfo) -> float | None:
    """Promised TFLOP/s of this rank's GPU; None of one that is not known, and of a CPU."""
    if rank.device != "cuda":
        return None
    import torch

    return peak_tflops(torch.cuda.get_device_name(rank.local_rank))


def device_memory() -> dict[str, Metric]:
    """GiB that this rank's GPU held at most since it started; nothing on a CPU."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    most = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return {f"perf/max_memory_{name}_gb": Peak(size / (1 << 30)) for name, size in most.items()}
