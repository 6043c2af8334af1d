"""A `transformers` model under FSDP2: parameters, gradients and optimizer are sharded over all ranks.

The unit is a decoder layer; the rest (embeddings, norm, head) lies with the root. Ranks that share rows
(`sequence_parallel`) shard the parameters as all others do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from streamrl.workers.engine.registry import EngineRegistry
from streamrl.workers.engine.torch_engine import TorchEngine

STAYS_GATHERED = 200_000_000
"""Parameters up to which a model stays gathered from forward to backward unless told otherwise: under 1 GiB per rank in
float32, and on small models the collectives would cost more than the arithmetic."""


class FSDP2Engine(TorchEngine):
    """Invariant: between calls the parameters are resharded, hence `DTensor`s."""

    def parallelize(self, module: nn.Module) -> nn.Module:
        fsdp, low = self.settings.fsdp, self.compute_dtype
        chosen = fsdp.reshard_after_forward
        self._reshard = self.parameters > STAYS_GATHERED if chosen is None else chosen
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("ranks",)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
            if fsdp.param_offload
            else OffloadPolicy(),
        }
        blocks = set(module.lm._no_split_modules or ())  # type: ignore[union-attr]
        for layer in module.lm.modules():  # type: ignore[union-attr]
            if type(layer).__name__ in blocks:
                fully_shard(layer, reshard_after_forward=self._reshard, **options)
        return fully_shard(module, reshard_after_forward=False, **options)  # type: ignore[return-value]

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """A model that stays gathered accumulates whole gradients and reduces them once."""
        if not self._reshard:
            self._call.set_requires_gradient_sync(last)  # type: ignore[operator]
            self._call.set_reshard_after_backward(last)  # type: ignore[operator]
        return nullcontext()

    def settle(self) -> None:
        """Else a later load or step would not reach the gathered copies."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@EngineRegistry.register("language_model", "fsdp2")
class FSDP2LanguageModel(FSDP2Engine):
    kind = "language_model"


@EngineRegistry.register("value_model", "fsdp2")
class FSDP2ValueModel(FSDP2Engine):
    kind = "value_model"


@EngineRegistry.register("reward_model", "fsdp2")
class FSDP2RewardModel(FSDP2Engine):
    kind = "reward_model"
