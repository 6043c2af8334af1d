"""Numbers that do not depend on the batch: for `trainer.deterministic`, the engine computes in fixed shapes.

A matrix product, a reduction or a vectorised loop takes another order of additions, or another tail, for another number
of rows. So every token goes through the same shapes, whoever comes with it:

    tokens of all rows ──by bucket of their own position, TILE at a time, padded──► one pass of exactly [TILE] tokens
    against exactly [bucket] cached positions each ──► hidden states ──TILE at a time──► logits ──► samples

A prompt token is computed as a sampled one is, so what a prefix in the cache saves is what would have been computed,
bit for bit. What is left is that a row of a fixed-shape product does not depend on its place or its neighbours; `check`
asks this machine's libraries, once per start.

It costs the padding of the last tile, a copy of the keys that each token looks at, and attention to the whole bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agent_loop.llm.protocol import SamplingParams
from streamrl.rollout.torch.decoder import Decoder, Layer, product
from streamrl.rollout.torch.sampling import Knobs, sample

TILE = 32
"""Tokens of one pass. A multiple of the widest vector (16 floats), so that no elementwise loop has a tail."""
BUCKET = 128
"""Cached positions that the first tokens of a row look at; doubled for those behind."""


class NotInvariant(RuntimeError):
    """This machine's matrix products give a row other bits beside other rows."""


class InvariantDecoder(Decoder):
    """As `Decoder`; a row's logits and cache entries are a function of its own tokens and the weights alone."""

    def __init__(self, model: nn.Module, rows: int, max_len: int) -> None:
        for parameter in model.parameters():  # as allocated here: where a file was mapped alignment may differ
            parameter.data = parameter.data.clone()
        super().__init__(model, rows + TILE, max_len)  # the last rows are nobody's, a pass may begin at any other
        self.check()

    @torch.inference_mode()
    def forward(self, first: int, ids: Tensor, start: Tensor, count: Tensor | None = None, longest: int = 0) -> Tensor:
        """As the decoder's; `longest` is not needed."""
        batch, width = ids.shape
        counts = np.full(batch, width) if count is None else count.cpu().numpy()
        row = np.repeat(np.arange(batch), counts)
        ends = np.cumsum(counts)
        offset = np.arange(len(row)) - np.repeat(ends - counts, counts)
        position = start.cpu().numpy()[row] + offset
        tokens = _Tokens(ids.cpu().numpy()[row, offset], first + row, position)
        found = torch.empty(len(row), self.embed.shape[1], dtype=self.dtype, device=self.device)
        reach = _buckets(position, self.max_len)
        for bucket in np.unique(reach):  # ascending: a token comes after those before it
            here = np.flatnonzero(reach == bucket)
            for chosen in _tiles(here):
                hidden = self._pass(tokens.tile(chosen, self.max_len), int(bucket))
                found[torch.from_numpy(chosen)] = hidden[: len(chosen)]
        return torch.cat([self._logits(found[torch.from_numpy(ends[rows] - 1)]) for rows in _tiles(np.arange(batch))])

    def _pass(self, tokens: _Tokens, bucket: int) -> Tensor:
        """[TILE, hidden] after the last layer; the tokens' keys and values are in the cache then."""
        ids, position = (torch.from_numpy(a).to(self.device) for a in (tokens.ids, tokens.positions))
        row = torch.from_numpy(tokens.rows).to(self.device)
        into = (position + row * (self.kv_heads * (self.max_len + 1)))[:, None, None] + self._heads_at
        penalty = torch.zeros(TILE, bucket, dtype=self.dtype, device=self.device)
        penalty.masked_fill_(self._arange[:bucket] > position[:, None], -torch.inf)
        cos, sin = self._cos[position], self._sin[position]  # [TILE, 1, dim]
        x = F.embedding(ids, self.embed)
        for index, layer in enumerate(self.layers):
            q = self._project(x, index, into.view(-1), cos, sin)
            keys, values = self._cached(index, tokens, row, bucket)
            x = self._attend(x, q, keys.flatten(0, 1), values.flatten(0, 1), penalty, layer)
            x = self._mlp(x, layer)
        return x

    def _project(self, x: Tensor, index: int, into: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries [TILE * kv, G, dim]; keys and values go to the cache."""
        layer, heads, kv, dim = self.layers[index], self.heads, self.kv_heads, self.dim
        normed = F.rms_norm(x, (x.shape[-1],), layer.attention_norm, self.eps)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(TILE, heads + 2 * kv, dim)
        rotated = qkv[:, : heads + kv]
        turned = rotated.roll(dim // 2, -1)
        rotated.mul_(cos).addcmul_(turned, sin)
        self._slots[index].index_copy_(0, into, qkv[:, heads:].reshape(-1, dim))
        return qkv[:, :heads].reshape(TILE * kv, heads // kv, dim)

    def _cached(self, index: int, tokens: _Tokens, row: Tensor, bucket: int) -> Tensor:
        """[2, TILE, kv, bucket, dim]: of each token the keys and values of its row; copied unless they lie together."""
        cached = self.cache[index]
        if tokens.consecutive:
            first = int(tokens.rows[0])
            return cached[:, first : first + TILE, :, :bucket]
        if 2 * bucket > self.max_len:  # whole rows are copied several times faster than parts of rows
            return cached.flatten(2).index_select(1, row).view(2, TILE, *cached.shape[2:])[:, :, :, :bucket]
        return torch.stack([cached[:, r, :, :bucket] for r in tokens.rows], 1)

    def _attend(self, x: Tensor, q: Tensor, keys: Tensor, values: Tensor, penalty: Tensor, layer: Layer) -> Tensor:
        """keys, values [TILE * kv, bucket, dim]."""
        scores = product(q, keys.transpose(1, 2)).mul_(self.dim**-0.5)
        weights = torch.softmax(scores.view(TILE, self.heads, -1).add_(penalty[:, None]), -1)
        mixed = product(weights.view(len(q), -1, penalty.shape[1]), values)
        return x + F.linear(mixed.reshape(TILE, -1), layer.out, layer.out_bias)

    def _logits(self, hidden: Tensor) -> Tensor:
        """f32[B, V] of at most TILE rows."""
        normed = F.rms_norm(_filled(hidden), (hidden.shape[-1],), self.norm, self.eps)
        return F.linear(normed, self.head)[: len(hidden)].float()

    @torch.inference_mode()
    def check(self) -> None:
        """Ask whether a token's bits depend on its place in a tile, on what is beside it, or on whether its keys were
        gathered. Raises NotInvariant."""
        first = self.rows - TILE
        rows = first + np.arange(TILE)
        noise = torch.Generator().manual_seed(0)
        for bucket in np.unique(_buckets(np.arange(self.max_len), self.max_len)):
            past = torch.randn(self.cache[:, :, 0, :, :bucket].shape, generator=noise).to(self.device, self.dtype)
            seen: list[Tensor] = []
            for place, gathered in ((0, False), (TILE // 2 + 1, False), (TILE - 1, False), (3, True)):
                tokens = _Tokens(
                    np.arange(TILE) % self.vocab_size, first + np.arange(TILE), np.full(TILE, self.max_len)
                )
                if gathered:
                    tokens.rows[:] = rows[::-1]
                tokens.ids[place], tokens.positions[place] = 0, bucket - 1
                self.cache[:, :, tokens.rows[place], :, :bucket] = past
                hidden = self._pass(tokens, int(bucket))
                seen.append(torch.cat([hidden[place], self._logits(hidden)[place]]))
            if not all(torch.equal(seen[0], other) for other in seen[1:]):
                raise NotInvariant(
                    f"matrix products on this {self.device.type} give a row other bits at another place of a batch of "
                    f"{TILE}: trainer.deterministic=true cannot be kept here. Use another machine, or set it to false"
                )
        self.cache[:, :, first:].zero_()


@dataclass(frozen=True, slots=True)
class _Tokens:
    """i64[N] each: of new tokens their id, their row of the cache, and their position in it."""

    ids: np.ndarray
    rows: np.ndarray
    positions: np.ndarray

    @property
    def consecutive(self) -> bool:
        """One token in each of a stretch of rows, as in every decode step: the cache is looked at where it lies."""
        return bool((np.diff(self.rows) == 1).all())

    def tile(self, chosen: np.ndarray, padding: int) -> _Tokens:
        """TILE tokens: these, then ones of the rows that follow, at position `padding`."""
        free = TILE - len(chosen)
        rows = self.rows[chosen]
        return _Tokens(
            np.concatenate([self.ids[chosen], np.zeros(free, np.int64)]),
            np.concatenate([rows, rows[-1] + 1 + np.arange(free)]),
            np.concatenate([self.positions[chosen], np.full(free, padding)]),
        )


def sample_rows(logits: Tensor, uniform: Sequence[float], sampling: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """As `sampling.sample`, of rows that do not see what the others ask for: those that ask for a cut are apart, and
    all come in tiles."""
    kinds = [(row.temperature == 0, row.top_k > 0, row.top_p < 1.0) for row in sampling]
    tokens = torch.empty(len(kinds), dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(len(kinds), device=logits.device)
    for kind in sorted(set(kinds)):
        alike = np.array([i for i, other in enumerate(kinds) if other == kind])
        for chosen in _tiles(alike):
            rows = [int(i) for i in chosen]
            filled = rows + rows[:1] * (TILE - len(rows))
            knobs = Knobs.of([sampling[i] for i in filled], logits.shape[-1], logits.device)
            drawn = torch.tensor([uniform[i] for i in filled], device=logits.device)
            at = torch.tensor(rows, device=logits.device)
            found = sample(_filled(logits[at]), drawn, knobs)
            tokens[at], log_probs[at] = found[0][: len(rows)], found[1][: len(rows)]
    return tokens, log_probs


def _buckets(positions: np.ndarray, max_len: int) -> np.ndarray:
    """How many cached positions a token at each of `positions` is computed with."""
    doubled = np.ceil(np.log2(np.maximum((positions + 1) / BUCKET, 1.0))).astype(np.int64)
    return np.minimum(BUCKET << doubled, max_len)


def _tiles(indices: np.ndarray) -> list[np.ndarray]:
    return [indices[at : at + TILE] for at in range(0, len(indices), TILE)]


def _filled(rows: Tensor) -> Tensor:
    """[TILE, ...], zeros behind."""
    missing = TILE - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows
