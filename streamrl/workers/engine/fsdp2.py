"""A `transformers` model under FSDP2: gloo on CPUs, NCCL on GPUs, one code path from one rank up.

Parameters are sharded per decoder layer, the rest (embeddings, norm, head) with the root. Ranks run their layers in
step, so all of them run as many micro-batches as the busiest one: who has fewer runs idle ones, whose loss is 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from streamrl.single_controller.worker import RankInfo
from streamrl.workers.batch import Padded, Rows, micro_batches, pad, unflatten
from streamrl.workers.engine import checkpoint, process_group
from streamrl.workers.engine.base import LossFunction, StepOutput, TokenOutputs
from streamrl.workers.engine.gather import full_parameters
from streamrl.workers.engine.policy_module import CausalPolicy
from streamrl.workers.engine.registry import EngineRegistry
from streamrl.workers.settings import ActorSettings

log = logging.getLogger(__name__)

STAYS_GATHERED = 200_000_000
"""Parameters up to which a model stays gathered from forward to backward unless told otherwise: under 1 GiB per rank in
float32, and on small models the collectives would cost more than the arithmetic."""

IDLE = Padded(np.zeros((1, 2), np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64))
"""The micro-batch of a rank that has none left: one token."""


@EngineRegistry.register("language_model", "fsdp2")
class FSDP2Engine:
    """AdamW on a sharded causal LM.

    Invariants: between calls the parameters are resharded, hence `DTensor`s; losses are sums over ranks, so the
    gradient is that of the global loss for any number of ranks and any cut into micro-batches.
    """

    def __init__(self, rank: RankInfo, settings: ActorSettings) -> None:
        self.rank, self.world_size = rank.rank, rank.world_size
        self._rank_info, self._settings = rank, settings
        self._device = torch.device(rank.device, rank.local_rank) if rank.device == "cuda" else torch.device("cpu")
        self._joined = False

    def initialize(self) -> dict[str, float | str]:
        began = time.perf_counter()
        process_group.join(self._rank_info)
        self._joined = True
        torch.manual_seed(self._settings.seed + self.rank)
        lm = load_model(self._settings.model.path).to(self._device)
        parameters = sum(p.numel() for p in lm.parameters())
        chosen = self._settings.reshard_after_forward
        self._reshard = parameters > STAYS_GATHERED if chosen is None else chosen
        self.policy = self._shard(CausalPolicy(lm))
        optim = self._settings.actor.optim
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )
        return {
            "parameters": parameters, "vocab_size": lm.config.vocab_size, "model_type": lm.config.model_type,
            "world_size": self.world_size, "device": str(self._device), "seconds": time.perf_counter() - began,
        }  # fmt: skip

    def _shard(self, policy: CausalPolicy) -> CausalPolicy:
        mesh = init_device_mesh(self._device.type, (self.world_size,), mesh_dim_names=("dp",))
        low = torch.bfloat16 if self._settings.param_dtype == "bfloat16" else None
        precision = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
        blocks = set(policy.lm._no_split_modules or ())
        for module in policy.lm.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=self._reshard)
        return fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=False)  # type: ignore[return-value]

    # --- computing ------------------------------------------------------------------------------------------------

    def infer(self, rows: Rows, *, temperature: float, max_tokens: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        split = micro_batches(rows.lengths, max_tokens)
        log_probs: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        entropies = list(log_probs)
        self.policy.eval()
        with torch.no_grad():
            for i in range(self._most(len(split))):
                part = rows.take(split[i]) if i < len(split) else None
                found, entropy = self._forward(pad(part) if part else IDLE, temperature)
                if part is not None:
                    for target, values in ((log_probs, found), (entropies, entropy)):
                        for index, row in zip(split[i], unflatten(values.cpu().numpy(), part.responses), strict=True):
                            target[index] = row
        self._reshard_all()
        return log_probs, entropies

    def train_batch(
        self, rows: Rows, loss: LossFunction, *, lr: float, temperature: float, max_tokens: int
    ) -> StepOutput:
        split = micro_batches(rows.lengths, max_tokens)
        steps = max(self._most(len(split)), 1)
        entropy_grad = self._settings.actor.entropy_coeff > 0
        sums: dict[str, torch.Tensor] = {}
        self.policy.train()
        for i in range(steps):
            self._sync_gradients(last=i == steps - 1)
            if i >= len(split):
                idle, _ = self._forward(IDLE, temperature)
                (idle.sum() * 0.0).backward()
                continue
            part = rows.take(split[i])
            padded = pad(part)
            log_probs, entropy = self._forward(padded, temperature, entropy_grad)
            columns = {name: self._tensor(part.flat(name)) for name in part.columns}
            value, found = loss(TokenOutputs(log_probs, entropy, self._tensor(padded.row), columns))
            (value * self.world_size).backward()  # FSDP averages gradients over ranks; the loss is a sum over them
            for name, tensor in found.items():
                sums[name] = sums[name] + tensor if name in sums else tensor
        values = torch.stack([s.double() for s in sums.values()]).tolist() if sums else []
        totals = dict(zip(sums, values, strict=True))
        grad_norm, taken = self._step(lr, self._drift(totals))
        return StepOutput(totals, grad_norm, taken, steps, rows.tokens)

    def _drift(self, totals: dict[str, float]) -> float:
        """Mean k3 estimate of KL(rollout || policy) over the tokens of the mini-batch, on all ranks."""
        if self._settings.actor.target_kl is None:
            return 0.0
        kl, tokens = self.all_sum(np.array([totals.get("rollout_k3_kl", 0.0), totals.get("tokens", 0.0)]))
        return float(kl / tokens) if tokens else 0.0

    def _step(self, lr: float, drift: float) -> tuple[float, bool]:
        """Gradient norm before clipping, and whether the step was taken."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._settings.actor.grad_clip)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        limit = self._settings.actor.target_kl
        taken = bool(np.isfinite(value)) and (limit is None or drift <= limit)
        if taken:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        elif not np.isfinite(value):
            log.warning("gradient norm is %s: this optimizer step is left out", value)
        self.optimizer.zero_grad(set_to_none=True)
        return value, taken

    def _forward(
        self, padded: Padded, temperature: float, entropy_grad: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = (self._tensor(padded.input_ids), self._tensor(padded.positions), self._tensor(padded.targets))
        return self.policy(*place, temperature, entropy_grad)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _sync_gradients(self, *, last: bool) -> None:
        """A model that stays gathered accumulates whole gradients and reduces them once."""
        if not self._reshard:
            self.policy.set_requires_gradient_sync(last)  # type: ignore[attr-defined]
            self.policy.set_reshard_after_backward(last)  # type: ignore[attr-defined]

    def _reshard_all(self) -> None:
        """After a forward without backward: else a later load or step would not reach the gathered copies."""
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # --- between ranks --------------------------------------------------------------------------------------------

    def _most(self, count: int) -> int:
        return int(self._reduce(np.array([count]), dist.ReduceOp.MAX)[0])

    def all_sum(self, values: np.ndarray) -> np.ndarray:
        return self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: np.ndarray, op: Any) -> np.ndarray:
        if self.world_size == 1:
            return np.asarray(values, np.float64)
        tensor = torch.from_numpy(np.array(values, np.float64))  # on the CPU: gloo carries it on GPUs as well
        dist.all_reduce(tensor, op)
        return tensor.numpy()

    # --- state ----------------------------------------------------------------------------------------------------

    def full_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, full in full_parameters(self.policy.lm.named_parameters(), self.world_size):
            if self.rank == 0:
                yield name, full.cpu()

    def save(self, directory: str) -> None:
        checkpoint.save(Path(directory), self.policy.lm, self.optimizer, rank=self.rank)

    def load(self, directory: str) -> None:
        checkpoint.load(Path(directory), self.policy.lm, self.optimizer, rank=self.rank)

    def close(self) -> None:
        if self._joined:
            self._joined = False
            process_group.leave()


def load_model(path: str) -> Any:
    """The causal LM in `path` (a directory), float32. Raises FileNotFoundError, ValueError saying what is missing."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not (Path(path) / "config.json").is_file():
        raise FileNotFoundError(
            f"actor_rollout_ref.model.path={path!r}: no config.json there; give a model's directory"
        )
    transformers_logging.disable_progress_bar()  # a rank has no terminal
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True, use_safetensors=True
    )
