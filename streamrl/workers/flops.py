"""Model FLOPs: what a pass over rows takes by arithmetic, and what a device could do in the time.

For a row of s tokens through a decoder-only transformer with N weights in its matrix products, L layers, and H heads of
d dimensions (Chowdhery et al., PaLM, 2022, appendix B; Kaplan et al. 2020 without the attention):

    forward             2·N·s + 4·L·H·d·s²     a product and a sum per weight and token; s² scores, s² weighted values
    forward, backward   6·N·s + 12·L·H·d·s²    the backward pass takes twice the forward pass

As there and in verl, attention counts in full though half of it is masked, and what is computed again (checkpointed
activations) does not count. N is what multiplies: of the embeddings only the output head, where verl counts the table
of the input, too. With adapters the frozen weights have no gradient of their own: 4·N·s.

*Utilisation* (MFU) is this, by the time it took, over the device's promised peak.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GATED = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "granite", "phi3"})
"""Families (`model_type`) whose layers are q, k, v, o and a gated MLP of three products."""
EXPERTS = frozenset({"mixtral", "qwen2_moe", "qwen3_moe"})
"""The same, with experts in the place of the MLP, of which a token takes some."""

PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500), ("B200", 2250), ("GH200", 989), ("H200", 989), ("H100 PCIe", 756), ("H100", 989), ("H800", 989),
    ("H20", 148), ("A100", 312), ("A800", 312), ("A40", 149.7), ("A10", 125), ("A10G", 125), ("L40S", 362),
    ("L40", 181), ("L20", 119.5), ("L4", 121), ("RTX 4090", 165.2), ("RTX 3090", 71), ("MI300X", 1307.4),
    ("MI250X", 383),
)  # fmt: skip
"""(words of the name that the driver gives, TFLOP/s of dense bfloat16 products, as in the vendor's data sheet). The
first that fits counts."""


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Of one model."""

    weights: int
    """N."""
    attention: int
    """L·H·d."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *, head: int | None = None) -> ModelFlops | None:
        """From a model's config.json; None of a family that is not known. `head`: outputs of the last product, if they
        are not the vocabulary (a value model has 1)."""
        config = config.get("text_config") or config
        family = config.get("model_type")
        if family not in GATED | EXPERTS:
            return None
        hidden, layers, heads = (
            config[f"{name}"] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        dim = config.get("head_dim") or hidden // heads
        key_values = config.get("num_key_value_heads") or heads
        mlp = _experts(config) if family in EXPERTS else 3 * hidden * config["intermediate_size"]
        layer = 2 * hidden * dim * (heads + key_values) + mlp
        return cls(layers * layer + hidden * (head or config["vocab_size"]), layers * heads * dim)

    @classmethod
    def at(cls, model_path: str, *, head: int | None = None) -> ModelFlops | None:
        """Of the model in this directory; None where it has no config.json."""
        path = Path(model_path) / "config.json"
        return cls.of(json.loads(path.read_text()), head=head) if path.is_file() else None

    def forward(self, lengths: Sequence[int]) -> float:
        return 2.0 * self.weights * sum(lengths) + 4.0 * self.attention * sum(s * s for s in lengths)

    def training(self, lengths: Sequence[int], *, adapters: bool = False) -> float:
        """Forward and backward; with `adapters` alone trained, which themselves are not counted."""
        saved = 2.0 * self.weights * sum(lengths) if adapters else 0.0
        return 3.0 * self.forward(lengths) - saved


def _experts(config: Mapping[str, Any]) -> int:
    """Weights of a layer that multiply one token: its router and those experts that it takes."""
    hidden = config["hidden_size"]
    experts = config.get("num_experts") or config["num_local_experts"]
    each = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size") or 0
    return hidden * experts + 3 * hidden * (each * config["num_experts_per_tok"] + shared)


def peak_tflops(device: str) -> float | None:
    """Promised TFLOP/s of the GPU that calls itself so; None of one that is not known."""
    return next((peak for words, peak in PEAKS if re.search(rf"\b{words}\b", device)), None)


@dataclass(slots=True)
class FlopCounter:
    """What this rank's model was given to compute since the last `take`."""

    model: ModelFlops | None
    peak: float | None
    """FLOP/s of the device; None: not known."""
    adapters: bool = False
    counted: float = 0.0

    def inferred(self, lengths: Sequence[int]) -> None:
        if self.model is not None:
            self.counted += self.model.forward(lengths)

    def trained(self, lengths: Sequence[int]) -> None:
        if self.model is not None:
            self.counted += self.model.training(lengths, adapters=self.adapters)

    def take(self, seconds: float, ranks: int = 1) -> tuple[float, float] | None:
        """(FLOPs since the last call, what the `ranks` that shared them could have done in `seconds`); None where the
        model or the device is not known."""
        counted, self.counted = self.counted, 0.0
        return (counted, self.peak * seconds * ranks) if self.peak and self.model is not None else None
