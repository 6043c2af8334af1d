"""Which part of a tensor goes from which training rank to which worker of a server; no I/O.

```
 N training ranks (FSDP2)          M workers of a server (tensor parallel)
 rank 0: rows 0..c                 split 0: worker 0 holds the first rows     q, k, v, gate, up, embeddings, head
 rank 1: rows c..2c         ──►    split 1: worker 0 holds the first columns  o, down
 ...                               None:    each holds all                    norms
```

A `Piece` is a box: one range of indices per dimension. Every number of a worker's part lies in exactly one piece, so
that a worker has its part once it has its pieces, from however many ranks. Source and target of a *lane* are one rank
and one worker: what travels on it is the concatenation of its pieces, tensor after tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

Box = tuple[range, ...]
Split = Callable[[str], "int | None"]
"""From the name of a tensor, the dimension over which workers share it; None: each has all of it."""

_SPLITS = (
    (re.compile(r"(^|\.)(q_proj|k_proj|v_proj|qkv_proj|gate_proj|up_proj|fc1|lm_head|embed_tokens)\."), 0),
    (re.compile(r"(^|\.)(o_proj|down_proj|fc2)\.weight$"), 1),
)


def whole(name: str) -> None:
    """The `Split` of a server of one worker."""


def tensor_parallel(name: str) -> int | None:
    """How decoder models are split by Megatron's scheme (arXiv:1909.08053, section 3), by Hugging Face's names: linear
    layers whose outputs are independent by rows, those that add up the parts by columns."""
    return next((split for pattern, split in _SPLITS if pattern.search(name)), None)


def part(length: int, number: int, of: int) -> range:
    """Indices of part `number` of `of`, as torch.chunk and FSDP2 cut: the last ones may have fewer, or none."""
    each = -(-length // of)
    return range(min(number * each, length), min((number + 1) * each, length))


def source_box(shape: tuple[int, ...], rank: int, ranks: int) -> Box:
    """What a training rank holds: rows. Of a number without dimensions rank 0 holds it, in a box of one row."""
    shape = shape or (1,)
    return (part(shape[0], rank, ranks), *map(range, shape[1:]))


def target_box(shape: tuple[int, ...], split: int | None, worker: int, workers: int) -> Box:
    """What a worker holds. Raises ValueError for a dimension that the tensor has not."""
    shape = shape or (1,)
    if split is None:
        return tuple(map(range, shape))
    if not 0 <= split < len(shape):
        raise ValueError(f"a tensor of shape {shape} has no dimension {split} over which {workers} workers could share")
    return tuple(part(n, worker, workers) if d == split else range(n) for d, n in enumerate(shape))


@dataclass(frozen=True, slots=True)
class Piece:
    """`box`: indices in the full tensor. Not empty."""

    source: int
    target: int
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.box))

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """Where it lies in a tensor that holds `outer`."""
        return tuple(slice(r.start - o.start, r.stop - o.start) for r, o in zip(self.box, outer, strict=True))


def pieces(shape: tuple[int, ...], split: int | None, *, ranks: int, workers: int) -> Iterator[Piece]:
    """Of one tensor, from all ranks to all workers, in the order of the ranks."""
    for source in range(ranks):
        mine = source_box(shape, source, ranks)
        for target in range(workers):
            box = _common(mine, target_box(shape, split, target, workers))
            if all(box):
                yield Piece(source, target, box)


def lane(
    shapes: Iterable[tuple[str, tuple[int, ...]]], split: Split, *, source: int, ranks: int, target: int, workers: int
) -> list[tuple[str, Piece]]:
    """What one rank sends to one worker, in order: both sides compute it and neither asks."""
    return [
        (name, piece)
        for name, shape in shapes
        for piece in pieces(shape, split(name) if workers > 1 else None, ranks=ranks, workers=workers)
        if (piece.source, piece.target) == (source, target)
    ]


def buckets(
    lane: list[tuple[str, Piece]], width: Callable[[str], int], limit: int
) -> Iterator[list[tuple[str, Piece]]]:
    """A lane in parts of at most `limit` bytes; a piece that is larger is a part of its own. `width`: bytes of one
    number of a tensor."""
    held: list[tuple[str, Piece]] = []
    size = 0
    for name, piece in lane:
        more = piece.numbers * width(name)
        if held and size + more > limit:
            yield held
            held, size = [], 0
        held.append((name, piece))
        size += more
    if held:
        yield held


def _common(a: Box, b: Box) -> Box:
    return tuple(range(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
