"""Engines: `base` says what one is, `settings` what it is told, `registry` finds them; `fsdp2` and `ddp` are the ones
for torch, on top of `torch_engine`. docs/engines.md shows how another would plug in."""

from __future__ import annotations

from streamrl.workers.engine.base import Engine, LossFunction, StepOutput, TokenOutputs, Weights
from streamrl.workers.engine.registry import EngineRegistry
from streamrl.workers.engine.settings import EngineSettings, LoRASettings

__all__ = [
    "Engine",
    "EngineRegistry",
    "EngineSettings",
    "LoRASettings",
    "LossFunction",
    "StepOutput",
    "TokenOutputs",
    "Weights",
]
