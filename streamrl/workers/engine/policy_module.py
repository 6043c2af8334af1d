"""A causal language model as a policy: from padded ids to the log-probs of its response tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LINEAR_HEADS = {"llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "olmo2", "smollm3"}
"""Model types whose logits are just `lm_head(hidden)`. For them the head runs on the response tokens only; others (a
soft cap, a logit scale) go through their own forward, which computes the logits of prompts and padding as well."""

ENTROPY_CHUNK = 2048
"""Tokens whose softmax is held at once when the entropy is only measured."""


class CausalPolicy(nn.Module):
    """Wraps a `transformers` causal LM; the unit that is sharded, so that its forward gathers the root's parameters."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        self._linear_head = lm.config.model_type in LINEAR_HEADS

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor, temperature: float,
        entropy_grad: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """input_ids i64[B, L] right-padded; positions, targets i64[T] as in `Padded`. Log-probs and entropy, f32[T]."""
        if self._linear_head:
            hidden = self.lm.model(input_ids=input_ids, use_cache=False).last_hidden_state
            logits = self.lm.lm_head(hidden.flatten(0, 1)[positions])
        else:
            logits = self.lm(input_ids=input_ids, use_cache=False).logits.flatten(0, 1)[positions]
        logits = logits.float() / temperature
        log_probs = -F.cross_entropy(logits, targets, reduction="none")
        if entropy_grad:
            return log_probs, entropy(logits)
        with torch.no_grad():
            return log_probs, torch.cat([entropy(chunk) for chunk in logits.detach().split(ENTROPY_CHUNK)])


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Of softmax(logits), in nats: f[T, V] -> f[T]."""
    return torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)
