"""Engines: `base` says what one is, `registry` finds them, `fsdp2` is the one for torch."""

from __future__ import annotations

from streamrl.workers.engine.base import Engine, LossFunction, StepOutput, TokenOutputs
from streamrl.workers.engine.registry import EngineRegistry

__all__ = ["Engine", "EngineRegistry", "LossFunction", "StepOutput", "TokenOutputs"]
