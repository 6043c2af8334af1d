"""What is computed of a `transformers` model: per response token log-probs and entropy, or a value; per row a score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from streamrl.workers.engine.attention import Packing

LINEAR_HEADS = {"llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "olmo2", "smollm3"}
"""Model types whose logits are just `lm_head(hidden)`. For them the head runs on the response tokens only; others (a
soft cap, a logit scale) go through their own forward, which computes the logits of prompts and padding as well."""

ENTROPY_CHUNK = 2048
"""Tokens whose softmax is held at once for the entropy; with a gradient it is computed again in the backward pass."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What a rank's model sees of a micro-batch: `Padded`, or its part of a `Packed` one, as tensors."""

    input_ids: torch.Tensor
    """i64[B, L]."""
    positions: torch.Tensor
    """i64[t]: where in the flattened [B * L] the response tokens are predicted."""
    targets: torch.Tensor
    """i64[t]."""
    position_ids: torch.Tensor | None = None
    """i64[B, L]; None: 0..L-1 in each row."""
    packing: Packing | None = None
    """None: padded."""

    def options(self) -> dict[str, Any]:
        if self.packing is None:
            return {"input_ids": self.input_ids, "use_cache": False}
        return {
            "input_ids": self.input_ids, "position_ids": self.position_ids, "packing": self.packing, "use_cache": False,
        }  # fmt: skip


class LanguageModel(nn.Module):
    """Wraps a causal LM; the unit that is sharded, so that its forward gathers the root's parameters."""

    outputs = ("log_probs", "entropy")

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        self._linear_head = lm.config.model_type in LINEAR_HEADS

    def forward(self, batch: ModelInput, temperature: float, entropy_grad: bool = False) -> tuple[torch.Tensor, ...]:
        """Log-probs and entropy, f[t], in float32 or what is more exact."""
        if self._linear_head:
            hidden = self.lm.model(**batch.options()).last_hidden_state
            logits = self.lm.lm_head(hidden.flatten(0, 1)[batch.positions])
        else:
            logits = self.lm(**batch.options()).logits.flatten(0, 1)[batch.positions]
        logits = _exact(logits) / temperature
        log_probs = -F.cross_entropy(logits, batch.targets, reduction="none")
        if entropy_grad and torch.is_grad_enabled():
            parts = [checkpoint(entropy, chunk, use_reentrant=False) for chunk in logits.split(ENTROPY_CHUNK)]
            return log_probs, torch.cat(parts)  # type: ignore[arg-type]
        with torch.no_grad():
            return log_probs, torch.cat([entropy(chunk) for chunk in logits.detach().split(ENTROPY_CHUNK)])


class ValueModel(nn.Module):
    """Wraps a token classifier with one label: V of the state before each response token is sampled."""

    outputs = ("values",)

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: ModelInput, temperature: float, entropy_grad: bool = False) -> tuple[torch.Tensor, ...]:
        """Values, f[t]; temperature is of no meaning here."""
        return (_exact(self.lm(**batch.options()).logits.flatten(0, 1)[batch.positions, 0]),)


class RewardModel(nn.Module):
    """Wraps a sequence classifier with one label: a score of each row, at its last token, as `transformers` has it."""

    outputs = ("scores",)

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        text = lm.config.get_text_config()
        self._padding, self._vocabulary = text.pad_token_id, text.vocab_size

    def forward(self, batch: ModelInput, temperature: float, entropy_grad: bool = False) -> tuple[torch.Tensor, ...]:
        """Scores, f[t] of the rows that end here; temperature is of no meaning."""
        hidden = self.lm.base_model(**batch.options()).last_hidden_state
        return (_exact(self.lm.score(hidden.flatten(0, 1)[batch.positions]))[:, 0],)

    def places(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """i64[B]: the last token of each row that is no padding to this model. Raises ValueError for one that it does
        not know."""
        found = np.zeros(len(rows), np.int64)
        for i, ids in enumerate(rows):
            if (largest := int(ids.max())) >= self._vocabulary:
                raise ValueError(f"a row has token {largest}; the reward model knows {self._vocabulary}")
            tokens = np.flatnonzero(ids != self._padding) if self._padding is not None else np.arange(len(ids))
            found[i] = tokens[-1] if tokens.size else 0
        return found


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Of softmax(logits), in nats: f[T, V] -> f[T]."""
    return torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)


def _exact(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()
