"""The forward pass of a Qwen2- or Llama-type model over rows that each have their own length.

The parameters stay those of the `transformers` model, with its names: q/k/v and gate/up are re-laid as views of one
fused tensor each, so copying new weights into the model updates the fused ones too. The key/value cache is one static
tensor per layer, `[2, rows, kv_heads, max_len + 1, head_dim]`; position `max_len` is where padding is written.

A call handles the rows `[first, first + B)` with T new tokens each: decode is T = 1, prefill is T > 1 and padded on the
right. Rows differ in `start`, the number of tokens already in their cache. Attention is written out as two batched
products: with one query per row that is several times faster on a CPU than a call into the general attention kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODEL_TYPES = ("qwen2", "llama")


class UnsupportedModel(ValueError):
    """The embedded engine has no forward pass for this model."""


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def check_supported(config: Any, max_len: int) -> None:
    """Raise UnsupportedModel if the forward pass here would not be this model's."""
    if config.model_type not in MODEL_TYPES:
        raise UnsupportedModel(
            f"model_type {config.model_type!r}: the torch engine runs {', '.join(MODEL_TYPES)}; "
            "use a vLLM or SGLang server"
        )
    if getattr(config, "hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {config.hidden_act!r}: the torch engine runs 'silu' only")
    windows = [kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"]
    if windows and (getattr(config, "sliding_window", None) or 0) < max_len:
        raise UnsupportedModel(
            f"sliding window of {config.sliding_window} tokens under max_model_len {max_len}: the torch engine attends "
            "to all tokens; lower max_model_len or use a vLLM or SGLang server"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ("default", "linear", "llama3", "yarn"):
        raise UnsupportedModel(
            f"rope type {rope!r} depends on the sequence's length; the torch engine uses a fixed table"
        )


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def bytes_per_token(model: nn.Module) -> int:
    """Cache memory of one token."""
    config: Any = model.config
    itemsize = next(model.parameters()).element_size()
    return 2 * config.num_hidden_layers * config.num_key_value_heads * _head_dim(config) * itemsize


class Decoder:
    """`forward` returns the logits after each row's last token and leaves its keys and values in the cache."""

    def __init__(self, model: nn.Module, rows: int, max_len: int) -> None:
        config: Any = model.config
        check_supported(config, max_len)
        inner: Any = model.model
        self.rows, self.max_len = rows, max_len
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.dim = _head_dim(config)
        self.eps: float = config.rms_norm_eps
        self.vocab_size: int = config.vocab_size
        self.embed: Tensor = inner.embed_tokens.weight
        self.norm: Tensor = inner.norm.weight
        self.head: Tensor = model.lm_head.weight  # type: ignore[union-attr,assignment]
        self.layers = [_fuse_layer(layer) for layer in inner.layers]
        self.device, self.dtype = self.embed.device, self.embed.dtype
        self.allocate()
        self._cos, self._sin = self._rotary_tables(inner.rotary_emb)
        side = torch.arange(2, device=self.device)[:, None] * (rows * self.kv_heads)
        self._heads_at = (side + torch.arange(self.kv_heads, device=self.device)) * (max_len + 1)  # [2, kv_heads]
        self._arange = torch.arange(max_len + 1, device=self.device)

    def allocate(self) -> None:
        """An empty cache."""
        shape = (len(self.layers), 2, self.rows, self.kv_heads, self.max_len + 1, self.dim)
        self.cache = _lazy_zeros(shape, self.dtype, self.device)
        self._slots = self.cache.view(len(self.layers), -1, self.dim)

    def release(self) -> None:
        """Give the cache's memory back to the device; nothing can be computed until `allocate`."""
        self.cache = self._slots = torch.empty(0, dtype=self.dtype, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _rotary_tables(self, rotary: nn.Module) -> tuple[Tensor, Tensor]:
        """[max_len + 1, 1, dim] each; the sine's first half is negated, so rotating is a roll and no negation."""
        positions = torch.arange(self.max_len + 1, device=self.device)[None]
        cos, sin = rotary(torch.zeros(1, dtype=self.dtype, device=self.device), positions)
        sin = sin.clone()
        sin[..., : self.dim // 2].neg_()
        return cos[0, :, None].contiguous(), sin[0, :, None].contiguous()

    @torch.inference_mode()
    def forward(self, first: int, ids: Tensor, start: Tensor, count: Tensor | None = None, longest: int = 0) -> Tensor:
        """Logits [B, vocab], float32, after the last of each row's `count` new tokens.

        ids [B, T], start [B] (tokens already cached), count [B] in 1..T (None: all T), longest = max(start + count).
        """
        batch, width = ids.shape
        offsets = self._arange[:width]
        positions = start[:, None] + offsets  # [B, T]
        attend = self._arange[:longest] <= positions[:, :, None]  # [B, T, L]
        penalty = torch.zeros(attend.shape, dtype=self.dtype, device=self.device).masked_fill_(~attend, -torch.inf)
        where = positions
        if count is not None:
            where = torch.where(offsets < count[:, None], positions, self.max_len)
        row_at = (first + self._arange_rows(batch)) * (self.kv_heads * (self.max_len + 1))
        into = (where[:, :, None, None] + row_at[:, None, None, None] + self._heads_at).view(-1)  # [B*T*2*kv_heads]
        cos, sin = self._cos[where], self._sin[where]  # [B, T, 1, dim]
        x = F.embedding(ids, self.embed)
        for index, layer in enumerate(self.layers):
            x = self._attention(x, index, layer, first, longest, into, cos, sin, penalty)
            x = self._mlp(x, layer)
        last = x[:, -1] if count is None else x[self._arange_rows(batch), count - 1]
        last = F.rms_norm(last, (last.shape[-1],), self.norm, self.eps)
        return F.linear(last, self.head).float()

    def _arange_rows(self, batch: int) -> Tensor:
        return torch.arange(batch, device=self.device)

    def _attention(
        self, x: Tensor, index: int, layer: Layer, first: int, longest: int, into: Tensor, cos: Tensor, sin: Tensor,
        penalty: Tensor,
    ) -> Tensor:  # fmt: skip
        batch, width, hidden = x.shape
        heads, kv, dim = self.heads, self.kv_heads, self.dim
        normed = F.rms_norm(x, (hidden,), layer.attention_norm, self.eps)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(batch, width, heads + 2 * kv, dim)
        rotated = qkv[:, :, : heads + kv]
        turned = rotated.roll(dim // 2, -1)
        rotated.mul_(cos).addcmul_(turned, sin)
        self._slots[index].index_copy_(0, into, qkv[:, :, heads:].reshape(-1, dim))
        keys, values = self.cache[index, :, first : first + batch, :, :longest].flatten(1, 2)  # [B*kv, L, dim] each
        q = qkv[:, :, :heads].view(batch, width, kv, heads // kv, dim).transpose(1, 2)  # [B, kv, T, G, dim]
        scores = product(q.reshape(batch * kv, -1, dim), keys.transpose(1, 2))
        scores = scores.mul_(dim**-0.5).view(batch, kv, width, -1, longest).add_(penalty[:, None, :, None])
        weights = torch.softmax(scores, -1).view(batch * kv, -1, longest)
        mixed = product(weights, values).view(batch, kv, width, -1, dim).transpose(1, 2)
        return x + F.linear(mixed.reshape(batch, width, heads * dim), layer.out, layer.out_bias)

    def _mlp(self, x: Tensor, layer: Layer) -> Tensor:
        normed = F.rms_norm(x, (x.shape[-1],), layer.mlp_norm, self.eps)
        gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` cached tokens of `source`."""
        if source != target and length:
            self.cache[:, :, target, :, :length] = self.cache[:, :, source, :, :length]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros (a masked NaN would still be NaN); on a CPU memory is taken page by page, when first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + 64, dtype=np.uint8)
    first = -memory.ctypes.data % 64  # kernels may add up in another order where memory begins elsewhere
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(shape)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Batched [M, K] x [K, N]. On a CPU a few rows go one by one: the one-row kernel costs a seventh of the other."""
    height = left.shape[1]
    if left.device.type != "cpu" or not 1 < height <= 6:
        return torch.bmm(left, right)
    return torch.cat([torch.bmm(left[:, i : i + 1], right) for i in range(height)], 1)


def _fuse(projections: list[Any]) -> tuple[Tensor, Tensor | None]:
    """One tensor holding the projections' weights below each other; the projections' parameters become views of it."""

    def join(parameters: list[nn.Parameter]) -> Tensor:
        fused = torch.cat([p.data for p in parameters])
        for parameter, part in zip(parameters, fused.split([len(p) for p in parameters]), strict=True):
            parameter.data = part
        return fused

    weight = join([p.weight for p in projections])
    return weight, join([p.bias for p in projections]) if projections[0].bias is not None else None


def _fuse_layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
    gate_up, gate_up_bias = _fuse([mlp.gate_proj, mlp.up_proj])
    return Layer(
        attention_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
    )
