"""Attention of packed rows, each within itself: N = sum of L tokens cost sum of L^2, not N^2.

    [1, H, N, D] ──(Ulysses: tokens of all ranks, heads of this one)──► bunches of rows of like length
                 ──► scaled_dot_product_attention of each ──► [1, N, H, D]

Registered with `transformers` under `NAME`; a model that takes its attention from there packs by it. `packing` comes as
a keyword argument through the model's forward, hence also when a checkpointed layer is computed again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from streamrl.workers.engine.sequence_parallel import heads_to_tokens, tokens_to_heads

NAME = "streamrl_packed"

LIKE = 0.75
"""Rows at least this part of the longest share its bunch. They are padded for attention alone; a call for each row
would cost more than the padding: see docs/engines.md."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Of other models' attention. Their rows have to be padded."""


@dataclass(frozen=True, slots=True)
class Bunch:
    """Rows of like length that lie one after the other: tokens [start, stop)."""

    start: int
    stop: int
    rows: int
    width: int
    gather: torch.Tensor | None
    """i64[rows * width]: the token at each padded place; None if all rows are `width` long."""
    scatter: torch.Tensor | None
    """i64[stop - start]: the padded place of each token."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the rows of one micro-batch lie."""

    lengths: tuple[int, ...]
    bunches: tuple[Bunch, ...]
    offsets: torch.Tensor = field(repr=False)
    """i32[rows + 1], for flash attention."""
    group: dist.ProcessGroup | None = None
    """The ranks that share the tokens."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device, group: dist.ProcessGroup | None = None) -> Packing:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        bunches, first = [], 0
        for i in range(1, len(lengths) + 1):
            if i < len(lengths) and LIKE * lengths[first] <= lengths[i] <= lengths[first]:
                continue
            bunches.append(_bunch(lengths[first:i], int(offsets[first]), device))
            first = i
        return cls(lengths, tuple(bunches), offsets.to(device, torch.int32), group)


def _bunch(lengths: tuple[int, ...], start: int, device: torch.device) -> Bunch:
    rows, width, tokens = len(lengths), lengths[0], sum(lengths)
    if tokens == rows * width:
        return Bunch(start, start + tokens, rows, width, None, None)
    size = torch.tensor(lengths)
    places = torch.arange(width)
    real = places < size[:, None]
    ends = size.cumsum(0)
    gather = (ends - size)[:, None] + torch.minimum(places, size[:, None] - 1)
    return Bunch(
        start, start + tokens, rows, width, gather.flatten().to(device), real.flatten().nonzero()[:, 0].to(device)
    )


def packed_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *,
    packing: Packing | None = None, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """query f[1, H, n, D], key and value f[1, H_kv, n, D] of this rank's n tokens -> f[1, n, H, D]. Causal."""
    foreign = [name for name in UNSUPPORTED if options.get(name) is not None]
    if packing is None or foreign:
        raise ValueError(
            f"{type(module).__name__}: packed attention has no {', '.join(foreign) or 'rows'}; "
            "set use_remove_padding=false"
        )
    if packing.group is not None:
        query, key, value = (heads_to_tokens(t, packing.group) for t in (query, key, value))
    varlen = _varlen() if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not dropout else None
    if varlen is not None:
        out = _flash(varlen, query[0], key[0], value[0], packing, scaling, sliding_window)
    else:
        parts = [
            _bunch_attention(query[0], key[0], value[0], bunch, dropout, scaling, sliding_window)
            for bunch in packing.bunches
        ]
        out = torch.cat(parts) if len(parts) > 1 else parts[0]
    out = out[None]
    return (tokens_to_heads(out, packing.group) if packing.group is not None else out), None


def _bunch_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bunch: Bunch, dropout: float,
    scaling: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """f[H, N, D] each -> f[stop - start, H, D]. Padding is on the right: no token sees it."""
    q, k, v = (_rows(tensor, bunch) for tensor in (query, key, value))
    mask = None
    if window is not None and bunch.width > window:
        place = torch.arange(bunch.width, device=q.device)
        distance = place[:, None] - place
        mask = (distance >= 0) & (distance < window)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    out = out.transpose(1, 2).flatten(0, 1)
    return out if bunch.scatter is None else out[bunch.scatter]


def _rows(tensor: torch.Tensor, bunch: Bunch) -> torch.Tensor:
    """f[H, N, D] -> f[rows, H, width, D]."""
    part = tensor[:, bunch.start : bunch.stop]
    if bunch.gather is not None:
        part = part.index_select(1, bunch.gather)
    return part.unflatten(1, (bunch.rows, bunch.width)).transpose(0, 1)


@cache
def _varlen() -> Callable[..., torch.Tensor] | None:
    """torch's own flash kernel for rows of any length; None where it is missing or has no windows and grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    takes = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= takes.keys() else None  # type: ignore[return-value]


def _flash(
    kernel: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    packing: Packing, scaling: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """f[H, N, D] each -> f[N, H, D]."""
    longest = max(packing.lengths)
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return kernel(
        q, k, v, packing.offsets, packing.offsets, longest, longest, scale=scaling,
        window_size=(-1 if window is None else window - 1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


def register() -> None:
    """Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
