"""Low-rank adapters by `peft`, in place: the model keeps its class and its own parameters' names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from streamrl.errors import ConfigError
from streamrl.workers.engine.settings import LoRASettings

HEADS = ("score", "classifier")
"""Of value models: trained as they are."""
ADAPTER = re.compile(r"(.*)\.lora_([AB])\.default\.weight")


def inject(lm: Any, settings: LoRASettings) -> None:
    """Adapters beside the target modules, everything else frozen but a value head.

    Raises ConfigError if peft is missing or the targets are none of the model's modules.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("model.lora_rank > 0 needs the package peft: pip install 'streamrl[lora]'") from error
    targets = settings.target_modules
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, exclude_modules=list(HEADS),  # type: ignore[arg-type]
        target_modules=targets if isinstance(targets, str) else list(targets),
    )  # fmt: skip
    try:
        inject_adapter_in_model(config, lm)
    except ValueError as error:
        raise ConfigError(f"model.target_modules={targets!r}: {error}") from error
    if any(getattr(module, "fan_in_fan_out", None) for module in lm.modules()):
        raise ConfigError(f"model type {lm.config.model_type} has transposed weights: no adapters for it")
    dtype = next(lm.parameters()).dtype
    for name, parameter in lm.named_parameters():
        if ADAPTER.fullmatch(name):
            parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(bool(ADAPTER.fullmatch(name)) or name.split(".")[0] in HEADS)


@contextmanager
def disabled(lm: nn.Module) -> Iterator[None]:
    """The model without its adapters, for forwards without gradients."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in lm.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:  # its public switch also sets requires_grad, which sharded parameters read only once
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged(named: Iterable[tuple[str, torch.Tensor]], settings: LoRASettings) -> Iterator[tuple[str, torch.Tensor]]:
    """W + alpha / rank * B A under the name of W, from full parameters in the model's order (W, A, B)."""
    held: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        adapter = ADAPTER.fullmatch(name)
        if ".base_layer." in name and name.endswith(".weight"):
            held["W"] = tensor
        elif adapter is None:
            yield name.replace(".base_layer.", "."), tensor
        elif adapter[2] == "A":
            held["A"] = tensor
        else:
            yield f"{adapter[1]}.weight", held["W"] + settings.alpha / settings.rank * (tensor @ held["A"])
            held.clear()
