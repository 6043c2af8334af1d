"""What the engines for `transformers` models share: micro-batches, forward, loss, step and weights. gloo on CPUs, NCCL
on GPUs, one code path from one rank up. How a model lies on the ranks is the subclass's: see `fsdp2` and `ddp`.

Ranks run their layers in step, so all of them run as many micro-batches as the busiest one: who has fewer runs idle
ones, whose loss is 0.
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from streamrl.errors import ConfigError
from streamrl.single_controller.worker import RankInfo
from streamrl.weight_sync.shares import Share, shares_of
from streamrl.workers.batch import MicroBatching, Packed, Padded, Rows, at_places, pack, pad, unflatten
from streamrl.workers.engine import checkpoint, loading, lora, process_group
from streamrl.workers.engine.attention import Packing
from streamrl.workers.engine.base import LossFunction, StepOutput, TokenOutputs, Weights
from streamrl.workers.engine.gather import full_parameters
from streamrl.workers.engine.modules import LanguageModel, ModelInput, RewardModel, ValueModel
from streamrl.workers.engine.offload import OptimizerOffload
from streamrl.workers.engine.sequence_parallel import whole
from streamrl.workers.engine.settings import EngineSettings
from streamrl.workers.engine.snapshot import Snapshot

log = logging.getLogger(__name__)

IDLE = Rows([np.zeros(2, np.int64)], [1])
"""The micro-batch of a rank that has none left."""

MODULES: dict[str, type[LanguageModel] | type[ValueModel] | type[RewardModel]] = {
    "language_model": LanguageModel, "value_model": ValueModel, "reward_model": RewardModel,
}  # fmt: skip


class TorchEngine(ABC):
    """AdamW on one model over `world_size` ranks.

    Invariant: losses are sums over the data-parallel ranks, so the gradient is that of the global loss for any number
    of ranks, any cut into micro-batches and any layout of rows.
    """

    kind: ClassVar[str]
    """A key of MODULES."""

    def __init__(self, rank: RankInfo, settings: EngineSettings) -> None:
        shared = settings.sequence_parallel
        if rank.world_size % shared:
            raise ConfigError(f"ulysses_sequence_parallel_size={shared} does not divide {rank.world_size} ranks")
        self.rank, self.world_size = rank.rank, rank.world_size
        self.dp_rank, self.dp_size = rank.rank // shared, rank.world_size // shared
        self.collects = rank.rank % shared == 0
        self._sp_rank = rank.rank % shared
        self._rank_info, self.settings = rank, settings
        self.device = torch.device(rank.device, rank.local_rank) if rank.device == "cuda" else torch.device("cpu")
        self.optimizer: torch.optim.Optimizer | None = None
        self._sp_group: dist.ProcessGroup | None = None
        self._snapshot: Snapshot | None = None
        self._host = checkpoint.HostMemory()
        self._joined = False

    # --- of the subclass ------------------------------------------------------------------------------------------

    @abstractmethod
    def parallelize(self, module: nn.Module) -> nn.Module:
        """Lay the parameters out on the ranks, in place; what to call for a forward."""

    @abstractmethod
    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are averaged over the ranks with the last one."""

    def placed(self) -> AbstractContextManager[Any]:
        """Around all computing: parameters are where they are computed with."""
        return nullcontext()

    def settle(self) -> None:
        """After forwards without a backward: leave the parameters as between calls."""
        return

    # --- life -----------------------------------------------------------------------------------------------------

    def initialize(self) -> dict[str, float | str]:
        began = time.perf_counter()
        if self.settings.deterministic and self.device.type == "cuda":  # one thread of a CPU does nothing else
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product on a GPU
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
        process_group.join(self._rank_info)
        self._joined = True
        if self.settings.sequence_parallel > 1:
            self._sp_group = dist.new_subgroups(self.settings.sequence_parallel)[0]  # type: ignore[assignment]
        lm = loading.load_model(self.kind, self.settings).to(self.device)
        self._packed = loading.pack_attention(lm, self.settings)
        self.module = MODULES[self.kind](lm)
        self.parameters = sum(p.numel() for p in lm.parameters())
        trainable = sum(p.numel() for p in lm.parameters() if p.requires_grad)
        self._call = self.parallelize(self.module)
        if self.settings.optim is not None:
            optim = self.settings.optim
            self.optimizer = torch.optim.AdamW(
                self._trained(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
            )
        self._offload = OptimizerOffload(self.optimizer, on=self.settings.fsdp.optimizer_offload)
        torch.manual_seed(self.settings.seed + self.rank)
        return {
            "parameters": self.parameters, "trainable": trainable, "vocab_size": lm.config.vocab_size,
            "model_type": lm.config.model_type, "world_size": self.world_size, "device": str(self.device),
            "seconds": time.perf_counter() - began,
        }  # fmt: skip

    def close(self) -> None:
        if self._joined:
            self._joined = False
            process_group.leave()

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Lower than the master weights', or None."""
        fsdp = self.settings.fsdp
        chosen = fsdp.dtype or ("bfloat16" if self.device.type == "cuda" and fsdp.model_dtype == "fp32" else "float32")
        return torch.bfloat16 if chosen == "bfloat16" else None

    # --- computing ------------------------------------------------------------------------------------------------

    def infer(
        self, rows: Rows, *, temperature: float, micro: MicroBatching, weights: Weights = "current"
    ) -> dict[str, list[np.ndarray]]:
        dtype = np.float64 if self.settings.fsdp.model_dtype == "fp64" else np.float32
        found = {name: [np.zeros(0, dtype)] * len(rows) for name in self.module.outputs}
        self.module.eval()
        with self.placed(), self._using(weights), torch.no_grad():
            for indices in self._cut(rows, micro):
                part = rows.take(indices) if indices else IDLE
                outputs = self._forward(self._lay_out(part), temperature)
                for name, values in zip(self.module.outputs, outputs, strict=True):
                    sizes = [1] * len(part) if isinstance(self.module, RewardModel) else part.responses
                    rowwise = unflatten(values.cpu().numpy().astype(dtype, copy=False), sizes)
                    for index, row in zip(indices, rowwise, strict=False):  # an idle one has a row and no index
                        found[name][index] = row
            self.settle()
        return found

    def train_batch(
        self, rows: Rows, loss: LossFunction, *, lr: float, temperature: float, micro: MicroBatching
    ) -> StepOutput:
        if self.optimizer is None:
            raise RuntimeError("this engine is frozen (optim=None) and trains nothing")
        sums: dict[str, torch.Tensor] = {}
        value = torch.zeros((), device=self.device)
        batches = self._cut(rows, micro)
        self.module.train()
        with self.placed():
            for i, indices in enumerate(batches):
                with self.accumulating(last=i == len(batches) - 1):
                    part, found = self._backward(rows.take(indices) if indices else None, loss, temperature)
                    value = value + part
                    for name, more in found.items():
                        sums[name] = sums[name] + more if name in sums else more
            values = torch.stack([s.double() for s in sums.values()]).tolist() if sums else []
            totals = dict(zip(sums, values, strict=True))
            grad_norm, taken = self._step(lr, self._drift(totals), self._sound(float(value)))
        return StepOutput(totals, grad_norm, taken, len(batches), rows.tokens)

    def _backward(
        self, rows: Rows | None, loss: LossFunction, temperature: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Gradients of a micro-batch; its loss and sums. None: an idle one."""
        laid = self._lay_out(rows or IDLE)
        outputs = self._forward(laid, temperature, self.settings.entropy_grad)
        if rows is None:
            (outputs[0].sum() * 0.0).backward()
            return torch.zeros((), device=self.device), {}
        columns = {name: self._tensor(rows.flat(name)) for name in rows.columns}
        named: dict[str, Any] = {"log_probs": None, "entropy": None} | dict(
            zip(self.module.outputs, outputs, strict=True)
        )
        value, sums = loss(TokenOutputs(row=self._tensor(laid.row), columns=columns, **named))
        (value * self.world_size).backward()  # gradients are averaged over ranks; the loss is a sum over them
        return value.detach(), sums

    def _forward(self, laid: Padded | Packed, temperature: float, entropy_grad: bool = False) -> list[torch.Tensor]:
        """f[T] each, the whole of them on every rank that shares the rows."""
        if isinstance(laid, Padded):
            ids, positions, targets = (self._tensor(a) for a in (laid.input_ids, laid.positions, laid.targets))
            return list(self._run(ModelInput(ids, positions, targets), temperature, entropy_grad))
        share = laid.input_ids.shape[1] // self.settings.sequence_parallel
        first = share * self._sp_rank
        mine = np.flatnonzero((laid.positions >= first) & (laid.positions < first + share))
        batch = ModelInput(
            self._tensor(laid.input_ids[:, first : first + share]), self._tensor(laid.positions[mine] - first),
            self._tensor(laid.targets[mine]), self._tensor(laid.position_ids[:, first : first + share]),
            Packing.of(laid.lengths, self.device, self._sp_group),
        )  # fmt: skip
        outputs = self._run(batch, temperature, entropy_grad)
        if self._sp_group is None:
            return list(outputs)
        places = self._tensor(mine)
        return [whole(part, places, len(laid.positions), self._sp_group) for part in outputs]

    def _run(self, *args: Any) -> tuple[torch.Tensor, ...]:
        return self._call(*args)

    def _lay_out(self, rows: Rows) -> Padded | Packed:
        laid = pack(rows, self.settings.sequence_parallel) if self._packed else pad(rows)
        if isinstance(self.module, RewardModel):
            return at_places(laid, rows.lengths, self.module.places(rows.input_ids))
        return laid

    def _cut(self, rows: Rows, micro: MicroBatching) -> list[list[int]]:
        """As many micro-batches on all ranks, at least one; ranks that share rows hold a part of each."""
        if micro.max_tokens is not None:
            micro = replace(micro, max_tokens=micro.max_tokens * self.settings.sequence_parallel)
        here = micro.cut(rows.lengths, packed=self._packed)
        if self.dp_size == 1:  # nobody to wait for: rows of like length stay together
            return here or [[]]
        count = max(int(self._reduce(np.array([len(here)]), dist.ReduceOp.MAX)[0]), 1)
        return micro.spread(rows.lengths, count, packed=self._packed)

    def _drift(self, totals: dict[str, float]) -> float:
        """Mean k3 estimate of KL(rollout || policy) over the tokens of the mini-batch, on all ranks."""
        if self.settings.target_kl is None:
            return 0.0
        kl, tokens = self.all_sum(np.array([totals.get("rollout_k3_kl", 0.0), totals.get("tokens", 0.0)]))
        return float(kl / tokens) if tokens else 0.0

    def _sound(self, loss: float) -> bool:
        """Whether the loss is finite on all ranks. The gradient does not tell: that of clamp(NaN) is 0."""
        return not self._reduce(np.array([float(not np.isfinite(loss))]), dist.ReduceOp.MAX)[0]

    def _step(self, lr: float, drift: float, sound: bool) -> tuple[float, bool]:
        """Gradient norm before clipping, NaN without a sound loss, and whether the step was taken."""
        assert self.optimizer is not None
        norm: Any = torch.nn.utils.clip_grad_norm_(self._trained(), self.settings.grad_clip)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) if sound else float("nan")
        limit = self.settings.target_kl
        taken = bool(np.isfinite(value)) and (limit is None or drift <= limit)
        if taken:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            with self._offload.loaded():
                self.optimizer.step()
        elif not np.isfinite(value):
            log.warning("the %s is not finite: this optimizer step is left out", "gradient norm" if sound else "loss")
        self.optimizer.zero_grad(set_to_none=True)
        return value, taken

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    # --- between ranks --------------------------------------------------------------------------------------------

    def all_sum(self, values: np.ndarray) -> np.ndarray:
        return self._reduce(values if self.collects else np.zeros_like(values), dist.ReduceOp.SUM)

    def _reduce(self, values: np.ndarray, op: Any) -> np.ndarray:
        if self.world_size == 1:
            return np.asarray(values, np.float64)
        tensor = torch.from_numpy(np.array(values, np.float64))  # on the CPU: gloo carries it on GPUs as well
        dist.all_reduce(tensor, op)
        return tensor.numpy()

    # --- weights --------------------------------------------------------------------------------------------------

    def snapshot(self) -> None:
        self._snapshot = Snapshot(self._trained())

    @contextmanager
    def _using(self, weights: Weights) -> Iterator[None]:
        if weights == "current" or (weights == "reference" and self.settings.optim is None):
            yield
        elif weights == "reference" and self.settings.lora is not None:
            with lora.disabled(self.module):
                yield
        elif weights == "snapshot" and self._snapshot is not None:
            with self._snapshot.restored():
                yield
        else:
            raise ValueError(
                f"infer(weights={weights!r}): "
                + ("there is no snapshot yet; call snapshot() first" if weights == "snapshot" else
                   "an engine that trains all its weights has no others; give the reference an engine of its own")
            )  # fmt: skip

    def full_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = full_parameters(self.module.lm.named_parameters(), self.world_size)
        for name, full in lora.merged(named, self.settings.lora) if self.settings.lora else named:
            if self.rank == 0:
                yield name, full.cpu()

    def shares(self) -> Iterator[Share]:
        named = self.module.lm.named_parameters()
        if self.settings.lora is None:
            yield from shares_of(named, self.rank, self.world_size)
            return
        merged = lora.merged(full_parameters(named, self.world_size), self.settings.lora)
        for share in shares_of(merged, self.rank, self.world_size):
            yield replace(share, local=share.local.clone())  # so that the full tensor can go

    def save(self, directory: str) -> None:
        checkpoint.save(Path(directory), self.module.lm, self.optimizer, rank=self.rank)

    def hold(self, directory: str) -> Callable[[], None]:
        shards = checkpoint.Shards.of(Path(directory), self.module.lm, self.optimizer, rank=self.rank)
        shards.hold(self._host)
        return shards.write

    def load(self, directory: str) -> None:
        with self._offload.loaded():
            checkpoint.load(Path(directory), self.module.lm, self.optimizer, rank=self.rank)
