"""A `transformers` model under DistributedDataParallel: each rank holds all of it, gradients are averaged in buckets.

For models that fit a rank several times over: no parameter is ever gathered.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from streamrl.workers.engine.registry import EngineRegistry
from streamrl.workers.engine.torch_engine import TorchEngine


class DDPEngine(TorchEngine):
    """Invariant: parameters are equal on all ranks; `fsdp.reshard_after_forward` has no meaning here."""

    _ddp: Any = None

    def parallelize(self, module: nn.Module) -> nn.Module:
        if not any(p.requires_grad for p in module.parameters()):
            return module
        with warnings.catch_warnings():  # the argument's successor is younger than the oldest torch we allow
            warnings.simplefilter("ignore", FutureWarning)
            self._ddp = DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)
        return self._ddp

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    @contextmanager
    def placed(self) -> Iterator[None]:
        """With `param_offload` the weights lie in CPU memory between calls."""
        if not self.settings.fsdp.param_offload:
            yield
            return
        self._move(self.device)
        try:
            yield
        finally:
            self._move(torch.device("cpu"))

    def close(self) -> None:
        """The reducer goes before the process group. Were it the group's last holder, the group would end under
        Python's lock and wait for gloo's threads, which may wait for that lock to free a tensor."""
        if self._ddp is not None:
            self._ddp.reducer = self._ddp.logger = None
        super().close()

    def _move(self, device: torch.device) -> None:
        for parameter in self.module.parameters():
            parameter.data = parameter.data.to(device)

    def _run(self, *args: Any) -> tuple[torch.Tensor, ...]:
        low = self.compute_dtype
        with torch.autocast(self.device.type, low, enabled=low is not None):
            return super()._run(*args)


@EngineRegistry.register("language_model", "ddp")
class DDPLanguageModel(DDPEngine):
    kind = "language_model"


@EngineRegistry.register("value_model", "ddp")
class DDPValueModel(DDPEngine):
    kind = "value_model"


@EngineRegistry.register("reward_model", "ddp")
class DDPRewardModel(DDPEngine):
    kind = "reward_model"
