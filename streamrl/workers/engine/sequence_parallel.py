"""Ulysses: ranks that share the tokens of a row exchange them for heads around attention (arXiv:2309.14509).

    outside attention   each of S ranks: N / S tokens, all H heads
    inside attention    each of S ranks: all N tokens, H / S heads

What each rank finds for its tokens is added up to the whole, so every rank computes the whole loss. Gradients: the loss
of one rank reaches, through `whole`, only that rank's tokens; over the S ranks that makes the gradient of one loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from streamrl.errors import ConfigError


def check_heads(heads: int, key_value_heads: int, ranks: int) -> None:
    """Raises ConfigError if the heads do not divide among the ranks."""
    if heads % ranks or (key_value_heads % ranks and ranks % key_value_heads):
        raise ConfigError(
            f"ulysses_sequence_parallel_size={ranks} does not divide the model's {heads} attention heads and "
            f"{key_value_heads} key-value heads; take a divisor of {heads} that divides {key_value_heads} or is a "
            "multiple of it"
        )


def heads_to_tokens(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """f[1, H, N / S, D] -> f[1, H / S, N, D]; fewer than S key-value heads are repeated, one for each rank."""
    ranks = group.size()
    if tensor.shape[1] < ranks:
        tensor = tensor.repeat_interleave(ranks // tensor.shape[1], dim=1)
    return _AllToAll.apply(tensor, group, 1, 2)  # type: ignore[return-value]


def tokens_to_heads(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """f[1, N, H / S, D] -> f[1, N / S, H, D]."""
    return _AllToAll.apply(tensor, group, 1, 2)  # type: ignore[return-value]


def whole(part: torch.Tensor, places: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """f[t] of this rank at `places` i64[t] of f[size]: the sum of it over the ranks, on each of them."""
    return _Whole.apply(part.new_zeros(size).index_put((places,), part), group)  # type: ignore[return-value]


class _AllToAll(torch.autograd.Function):
    """Cut along `cut`, one part for each rank; join what comes from each along `join`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, cut: int, join: int) -> torch.Tensor:
        ctx.group, ctx.cut, ctx.join = group, cut, join
        ranks = group.size()
        sent = torch.stack(tensor.chunk(ranks, cut)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _AllToAll.apply(grads[0], ctx.group, ctx.join, ctx.cut), None, None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None
